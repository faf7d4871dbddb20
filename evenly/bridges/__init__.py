"""Jobs of what other libraries train: transformers' Trainer, Lightning's modules."""

"""Stages of a model on the ranks of the pipeline axis, and the order in which they run microbatches."""

"""Loggers: sinks that pass the figures of a run to TensorBoard, Weights & Biases, MLflow or a CSV file."""

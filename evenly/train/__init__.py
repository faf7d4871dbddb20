"""The step, precision, the run and its loop."""

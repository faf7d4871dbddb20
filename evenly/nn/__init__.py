"""Functions for the models and losses of jobs, which every plan knows how to split."""

from evenly.nn.losses import linear_cross_entropy as linear_cross_entropy

__all__ = ["linear_cross_entropy"]

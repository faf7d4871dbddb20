"""Weights of recurrent layers that stay where they are while a run has them.

On a GPU a recurrent layer of torch moves its weights into one buffer, which cuDNN reads without a copy: where it is
moved itself, and in a forward that finds other parameters in it than the last one did, as those that `fully_shard` has
gathered are, or averaged ones. Who knows the memory in which they were does not reach them from then on: what is
gathered later, or updated there, the layer never sees, and computes with the weights that it had at first.
"""

from __future__ import annotations

from torch import nn


class RecurrentWeights:
    """Keeps the weights of the recurrent layers of `model` in their memory; `close` undoes it.

    Order: made when the model is on its device, where its layers have moved them once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [one for one in model.modules() if isinstance(one, nn.RNNBase)]
        for layer in self._layers:
            vars(layer)["flatten_parameters"] = _leave

    def close(self) -> None:
        for layer in self._layers:
            vars(layer).pop("flatten_parameters", None)


def _leave() -> None:
    """In place of `flatten_parameters`, which a job may call too."""

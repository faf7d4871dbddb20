"""Refusing what a forward pass must not do where ranks share a batch: change the model.

Each rank would change its copy by its own microbatches only. What changes by a rule is the exception (`statistics`).
"""

from __future__ import annotations

from collections.abc import Container, Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from evenly.errors import ContractError, UserError
from evenly.parallel.core.calls import ForwardEnded
from evenly.parallel.core.parameter_views import local_tensor
from evenly.torch_private import has_memory, is_fake, memory_key, version

Kind = tuple[int, torch.dtype | None]  # version and type: a module's cast leaves the tensor and its version
State = tuple[torch.Tensor | None, Kind]


class MutationGuard:
    """Watches the buffers of a model's state and, where they are all here as they are, its parameters.

    That a tensor is changed or replaced is seen in every forward. That its numbers are written past autograd (`.data`)
    is seen in the first alone, of what is not trained. A buffer may be given the values that it has.
    """

    def __init__(self, model: nn.Module, *, but: Container[int] = (), parameters: bool = True) -> None:
        """but: ids of buffers that may change."""
        state = {id(value) for value in model.state_dict(keep_vars=True).values()}
        self._watched: list[tuple[str, nn.Module, str]] = []
        for prefix, module in model.named_modules():
            found: list[tuple[str, torch.Tensor]] = [
                (name, one) for name, one in module.named_buffers(recurse=False) if id(one) in state
            ]
            if parameters:
                found += module.named_parameters(recurse=False)
            for name, tensor in found:
                if id(tensor) not in but:
                    self._watched.append((f"{prefix}.{name}".lstrip("."), module, name))
        self._first = True
        self.noticed: set[str] | None = None  # collects the names of buffers that change, which are then not refused
        self._buffers: dict[str, tuple[int, int, int]] = {}  # full name -> id, version, fingerprint

    def __bool__(self) -> bool:
        return bool(self._watched)

    def allow(self, names: Container[str]) -> None:
        """Lets these change from now on."""
        self._watched = [one for one in self._watched if one[0] not in names]

    @contextmanager
    def watching(self) -> Generator[None]:
        """Around a forward. Raises `RunError` that names what has changed."""
        before = self._state()
        self._remember(before)
        first, self._first = self._first, False
        prints = _prints([tensor for tensor, _ in before]) if first else {}
        try:
            yield
        except ForwardEnded:
            self._compare(before, {})
            raise
        self._compare(before, prints)

    def _state(self) -> list[State]:
        now = [local_tensor(module, name) for _, module, name in self._watched]
        return [(tensor, _kind(tensor)) for tensor in now]

    def _remember(self, before: Sequence[State]) -> None:
        """Takes the fingerprints of buffers, of each once unless it is changed between forwards."""
        for (full, _, _), (tensor, (count, _)) in zip(self._watched, before, strict=True):
            if type(tensor) is nn.Parameter:
                continue  # most are
            if tensor is not None and not isinstance(tensor, nn.Parameter) and not is_fake(type(tensor)):
                known = self._buffers.get(full)
                if known is None or known[:2] != (id(tensor), count):
                    self._buffers[full] = id(tensor), count, fingerprint(tensor)

    def _compare(self, before: Sequence[State], prints: dict[int, int]) -> None:
        for (full, _, _), (tensor, kind), (now, kind_now) in zip(self._watched, before, self._state(), strict=True):
            if now is None or tensor is None:
                continue  # of another rank
            if now is tensor and kind_now == kind and not prints:
                continue
            written = id(tensor) in prints and now is tensor and fingerprint(tensor) != prints[id(tensor)]
            changed = now is not tensor or kind_now != kind
            if not written and not (changed and not self._has_its_values(full, now)):
                continue
            if self.noticed is not None and not isinstance(tensor, nn.Parameter):
                self.noticed.add(full)
            else:
                raise changed_error(full, parameter=isinstance(tensor, nn.Parameter))

    def _has_its_values(self, full: str, now: torch.Tensor) -> bool:
        known = self._buffers.get(full)
        return known is not None and known[2] == fingerprint(now)


def _kind(tensor: torch.Tensor | None) -> Kind:
    return (0, None) if tensor is None else (version(tensor), tensor.dtype)


def _prints(tensors: Sequence[torch.Tensor | None]) -> dict[int, int]:
    here = [one for one in tensors if one is not None and _has_numbers(type(one)) and not one.is_meta]
    return {id(one): fingerprint(one) for one in here if not one.requires_grad}


def _has_numbers(kind: type) -> bool:
    return kind in (torch.Tensor, nn.Parameter) or nn.Parameter in kind.__bases__


def memory_of(model: nn.Module) -> dict[str, tuple[int, int, torch.dtype]]:
    """Return by name which tensor each parameter and buffer is on this rank, with its memory and type."""
    return {
        f"{prefix}.{name}".lstrip("."): (id(tensor), memory_key(tensor), tensor.dtype)
        for prefix, module in model.named_modules()
        for name in (*module._parameters, *module._buffers)  # pyright: ignore[reportPrivateUsage]
        if (tensor := local_tensor(module, name)) is not None and has_memory(tensor)
    }


def check_memory(model: nn.Module, before: Mapping[str, tuple[int, int, torch.dtype]]) -> None:
    """Raise `UserError` where a mode of `model` has given a tensor other memory or another type than `before`."""
    if moved := sorted(name for name, _ in before.items() ^ memory_of(model).items()):
        raise UserError(
            "an evaluation of the model by its own train() and eval()",
            f"they put another tensor, other memory or another type in the place of {moved[0]}",
            "let them write into the tensor that is there (add_, copy_), or cast where the forward computes",
        )


ADVICE = (
    "let the forward add to buffers that are zeroed in a hook (on_step), which moves the rest by their sums, within "
    "run.whole_parameters(); see the page State of your own; no buffer may change under pipeline"
)


def changed_error(name: str, *, parameter: bool) -> ContractError:
    """The error for what a forward must not change."""
    return ContractError(
        f"{'parameter' if parameter else 'buffer'} {name} changes in the forward pass",
        "each rank would change it by its own microbatches only",
        ADVICE,
    )


WORDS_AT_ONCE = 1 << 16


def fingerprint(tensor: torch.Tensor) -> int:
    """A number that depends on a tensor's elements and their order; another tensor hardly has the same."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return fingerprint_of_bytes(real.detach().contiguous().flatten().view(torch.uint8))


def fingerprint_of_bytes(content: torch.Tensor) -> int:
    """The fingerprint of bytes, 1D: words weigh by their places."""
    if content.storage_offset() % 8:
        content = content.clone()
    words = content.numel() // 8 * 8
    total = content.numel()
    most = min(max(words // 8, 8), WORDS_AT_ONCE)
    odd = content.new_full((most,), 2, dtype=torch.int64).cumsum_(0).sub_(1)
    for part in (*content[:words].view(torch.int64).split(WORDS_AT_ONCE), content[words:].long()):
        total = (total * 31 + int(_dot(part, odd[: len(part)]))) % 2**63
    return total


def _dot(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Their product modulo 2**64; on the CPU without memory for the terms, which would leave holes in the heap."""
    return torch.dot(words, weights) if words.device.type == "cpu" else (words * weights).sum()

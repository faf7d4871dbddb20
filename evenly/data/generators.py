"""Seeds the global generators of torch, Python and numpy from a stream key.

torch's previous state is restored on exit, so that neither a step nor an evaluation changes the random numbers of the
code around it. Python's and numpy's generators are not restored: that takes longer than a small forward pass.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch

FRESH = 624  # position of a Mersenne Twister that was just seeded: of the numbers that it makes at a time
# Of Python's and numpy's: the first word of the state and the position in it. Python keeps a second normal number.
Position = tuple[tuple[int, int, float | None], tuple[int, int]]
_seeded: Position = (0, 0, None), (0, 0)  # where `seed_past_torch` has put them, from this key
_seeded_from = 0


@contextmanager
def undisturbed(*devices: str | torch.Generator) -> Generator[None]:
    """Restore the state of torch's generators on exit, of the CPU and of `devices`, or those that are given."""
    generators = _generators(*devices)
    saved = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, saved, strict=True):
            generator.set_state(state)


def reseed(key: int, device: str = "cpu") -> None:
    """Seeds torch's generators of the CPU and of `device` from the stream `key`; use within `undisturbed`."""
    torch.default_generator.manual_seed(key)
    if device.startswith("cuda"):
        _gpu_generator(device).manual_seed(key)


def reseeding(device: str) -> Callable[[int], object]:
    """`reseed` of generators of `device`, by the shortest way: every block of a microbatch asks twice."""
    return partial(reseed, device=device) if device.startswith("cuda") else torch.default_generator.manual_seed


def last_seed() -> int:
    """The key that torch's generator of the CPU was last seeded from, or was when its state was saved."""
    return torch.default_generator.initial_seed()


def seed(key: int, device: str = "cpu") -> None:
    reseed(key, device)
    seed_past_torch(key)


def seed_past_torch(key: int) -> None:
    """Seeds Python's and numpy's generators from the stream `key`."""
    global _seeded, _seeded_from
    _seed_past_torch(key)
    _seeded, _seeded_from = ((1 << 31, FRESH, None), (key & 0xFFFFFFFF, FRESH)), key


def _seed_past_torch(key: int) -> None:
    random.seed(key)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(key & 0xFFFFFFFF)


def drawn_past_torch() -> bool:
    """Whether Python's or numpy's generator was drawn from since `seed`."""
    return position_past_torch() != _seeded


def position_past_torch() -> Position:
    """Where Python's and numpy's generators are; the same twice where nothing was drawn between."""
    numpy, (_, state, second) = sys.modules.get("numpy"), random.getstate()
    return (state[0], state[-1], second), _seeded[1] if numpy is None else _numpys_position(numpy)


def positions(*devices: str) -> tuple[Any, ...]:
    """Where all generators are, those of `devices` among them; the same twice where nothing was drawn between."""
    states = [generator.get_state().numpy().tobytes() for generator in _generators(*devices)]
    return (*states, position_past_torch())


def _numpys_position(numpy: Any) -> tuple[int, int]:
    """From numpy's own memory: `get_state` takes 40 us, and every microbatch of a stage asks."""
    state = _state_at(numpy.random.get_bit_generator().ctypes.state_address)
    if state is not None:
        return state.key[0], state.position
    _, key, position, *_ = numpy.random.get_state()
    return int(key[0]), position


class _Twister(ctypes.Structure):
    """numpy's Mersenne Twister in memory."""

    _fields_ = (("key", ctypes.c_uint32 * FRESH), ("position", ctypes.c_int))


@cache
def _state_at(address: int) -> _Twister | None:
    """The state of numpy's generator in its own memory; None where that has another form."""
    numpy: Any = sys.modules["numpy"]
    twister, state = _Twister.from_address(address), numpy.random.get_state()
    try:
        for first, position in ((2, 1), (3, FRESH)):  # two of each, so that no other numbers there are taken for them
            numpy.random.set_state((state[0], [first, *state[1][1:]], position, *state[3:]))
            if (twister.key[0], twister.position) != (first, position):
                return None
        return twister
    finally:
        numpy.random.set_state(state)


@contextmanager
def undisturbed_past_torch() -> Generator[None]:
    """Restores the state of Python's and numpy's generators on exit."""
    state = _state_past_torch()
    try:
        yield
    finally:
        _put_back_past_torch(state)


def _state_past_torch() -> tuple[Any, Any]:
    """Of Python's and of numpy's generator; None for the latter where numpy is not imported."""
    numpy: Any = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _put_back_past_torch(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])  # type: ignore[attr-defined]


class DrawnNumbers:
    """Random numbers that code draws from torch's generators of the CPU and of `devices`, from Python's and numpy's.

    Order: made before the code runs; `end` after it; `again` for each repetition.
    """

    def __init__(self, *devices: str | torch.Generator) -> None:
        self._devices = devices
        self.states = [(generator, generator.get_state()) for generator in _generators(*devices)]
        self._position = position_past_torch()
        # Reading the whole state takes long, and is seldom needed: most code draws from torch alone.
        self._past_torch = _seeded_from if self._position == _seeded else _state_past_torch()
        self._drew_past_torch = True

    def end(self) -> None:
        """Notes whether the code drew past torch."""
        self._drew_past_torch = position_past_torch() != self._position

    @contextmanager
    def again(self) -> Generator[None]:
        """Within, the same numbers are drawn again; all generators are put back on exit."""
        with undisturbed(*self._devices), undisturbed_past_torch() if self._drew_past_torch else nullcontext():
            for generator, state in self.states:
                generator.set_state(state)
            if self._drew_past_torch:
                self._put_back_past_torch()
            yield

    def _put_back_past_torch(self) -> None:
        if isinstance(self._past_torch, tuple):
            _put_back_past_torch(self._past_torch)
        else:
            _seed_past_torch(self._past_torch)


@contextmanager
def seeded(key: int, device: str = "cpu") -> Generator[None]:
    """Within, all random numbers of the CPU and of `device` come from the stream `key`."""
    with undisturbed(device):
        seed(key, device)
        yield


def _generators(*devices: str | torch.Generator) -> list[torch.Generator]:
    gpus = [_gpu_generator(one) for one in devices if isinstance(one, str) and one.startswith("cuda")]
    return [torch.default_generator, *gpus, *(one for one in devices if isinstance(one, torch.Generator))]


def _gpu_generator(device: str) -> torch.Generator:
    torch.cuda.init()
    return torch.cuda.default_generators[torch.device(device).index or 0]

"""Tensors that say they are on a GPU and have their numbers on the CPU.

Operations on them run on the CPU, between the checks that a GPU makes: that their tensors are on one device. Where the
host would wait for the GPU, that is noted. Autograd, autocast and modules take them for what they say they are: the
backward runs in the device's own thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode

import evenly

ROOTS = [f"{Path(evenly.__file__).parent}/", f"{Path(__file__).parents[1]}/"]
# How many elements their results have depends on numbers.
SIZED_BY_NUMBERS = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
READS = {"_local_scalar_dense", "equal", "is_nonzero", "item", *SIZED_BY_NUMBERS}
COPIES = {"_to_copy", "copy_", "copy"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
PLAIN = (torch.Tensor, nn.Parameter)


class Gpu:
    """The GPU of this process: `device`, its generator of random numbers, and the waits that were noted.

    waits: how the host waited for it ("read", "upload", "synchronize"), and where in the package or a test.
    mixes: where tensors of two devices met; None: that raises, as a GPU would.
    pinned: addresses of memory that was asked to be page-locked.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda:0")
        self.generator = torch.Generator()
        self.waits: list[str] = []
        self.mixes: list[str] | None = None
        self.pinned: set[int] = set()

    def note(self, kind: str, operation: str) -> None:
        """Notes that the host waits."""
        self.waits.append(f"{kind}: {operation} in {_line()}")

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Within, torch's generator of the CPU draws what this GPU's would."""
        mine, cpu = self.generator, torch.default_generator
        before = cpu.get_state()
        cpu.set_state(mine.get_state())
        try:
            yield
        finally:
            mine.set_state(cpu.get_state())
            cpu.set_state(before)


gpu = Gpu()


class _Asked(threading.local):
    """Of which class the next tensor is made, if not the usual one."""

    kind: Any = None


_asked = _Asked()


@cache
def _both(kind: type[torch.Tensor]) -> Any:
    return kind if issubclass(kind, CudaTensor) else type(kind.__name__, (kind, CudaTensor), {})


class CudaTensor(torch.Tensor):
    """A tensor on `gpu`; its memory is the CPU's."""

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> CudaTensor:
        make: Any = torch.Tensor._make_subclass
        return make(_asked.kind or cls, numbers, False, dispatch_device=True, device_for_backend_keys=gpu.device)

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def as_subclass(self, cls: type[torch.Tensor]) -> Any:
        """As of class `cls`, which may look at what is done to it; also of this one."""
        _asked.kind = None if cls is torch.Tensor else _both(cls)
        try:
            return super().as_subclass(cls)
        finally:
            _asked.kind = None

    @property
    def device(self) -> torch.device:
        return gpu.device

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {gpu.device} device type tensor to numpy. Use Tensor.cpu() to copy it first.")

    def __array__(self, *_: Any) -> Any:
        return self.numpy()


class CudaMode(TorchDispatchMode):
    """Within, tensors are made on `gpu` and moved there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        active: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if active is not None or any(issubclass(kind, FakeTensor) for kind in types):
            with active or _mode_of(args, kwargs), torch._C.DisableTorchFunction():  # no numbers, wherever they are
                return func(*mapped(_as_fake, args), **mapped(_as_fake, kwargs))
        if any(kind not in PLAIN and not issubclass(kind, CudaTensor) for kind in types):
            return NotImplemented  # a subclass, whose parts come by themselves
        return run(func, args, kwargs)


def mapped(change: Callable[[Any], Any], nest: Any) -> Any:
    """`nest`, of lists, tuples and mappings, with `change` of all that is in it."""
    if isinstance(nest, (list, tuple)):
        return type(nest)([mapped(change, one) for one in nest])
    if isinstance(nest, dict):
        return {name: mapped(change, one) for name, one in nest.items()}
    return change(nest)


def tensors_of(nest: Any) -> list[torch.Tensor]:
    """All tensors in it."""
    found: list[torch.Tensor] = []
    mapped(lambda one: found.append(one) if isinstance(one, torch.Tensor) else None, nest)
    return found


def _mode_of(*nest: Any) -> Any:
    """torch's mode of the fake tensors in `nest`."""
    return next(one.fake_mode for one in tensors_of(nest) if isinstance(one, FakeTensor))


def _as_fake(one: Any) -> Any:
    if not isinstance(one, CudaTensor):
        return one
    return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)


def numbers_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the CPU."""
    with torch._C._DisableTorchDispatch():  # pyright: ignore
        plain = torch.empty(0, dtype=tensor.dtype)
        storage = tensor.untyped_storage()
        return plain.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # pyright: ignore


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operation, as a GPU would have it."""
    with torch._C.DisableTorchFunction():  # pyright: ignore
        return _run(func, args, kwargs)


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if func is torch.ops.prim.device.default:
        return gpu.device
    name = func._opname
    tensors = tensors_of((args, kwargs))
    mine = [one for one in tensors if isinstance(one, CudaTensor)]
    asked = kwargs.get("device")
    target = "cuda" if asked is None and mine else "cpu" if asked is None else torch.device(asked).type
    if name == "is_pinned":
        return args[0].untyped_storage().data_ptr() in gpu.pinned
    if name == "_pin_memory":
        pinned = args[0].clone()
        gpu.pinned.add(pinned.untyped_storage().data_ptr())
        return pinned
    if not mine and target != "cuda":
        return func(*args, **{**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs)
    check_devices(name, args, tensors)
    note_waits(name, args, kwargs, tensors, target)
    known: dict[int, tuple[torch.Tensor, CudaTensor]] = {}
    plain_args, plain_kwargs = (mapped(lambda one: _plain(one, known), nest) for nest in (args, kwargs))
    if plain_kwargs.get("pin_memory"):
        plain_kwargs["pin_memory"] = False
    if name == "_fused_sdp_choice":
        return 0  # plain operations
    if name == "_to_copy" and target == "cpu":
        plain_kwargs["non_blocking"] = False
    drawn = torch.Tag.nondeterministic_seeded in func.tags
    with gpu.drawing() if drawn and kwargs.get("generator") is None else nullcontext():
        result = func(*plain_args, **plain_kwargs)
    for numbers, tensor in known.values():
        if numbers.shape != tensor.shape or numbers.stride() != tensor.stride():
            tensor.data = CudaTensor(numbers)  # set_, resize_ and their like
    on_cpu = target == "cpu" or (name == "copy_" and not isinstance(args[0], CudaTensor))
    return mapped(lambda one: _placed(one, known, on_cpu=on_cpu), result)


def _plain(one: Any, known: dict[int, tuple[torch.Tensor, CudaTensor]]) -> Any:
    if isinstance(one, CudaTensor):
        numbers = numbers_of(one)
        known[id(numbers)] = numbers, one
        return numbers
    return torch.device("cpu") if isinstance(one, torch.device) else one


def _placed(one: Any, known: Mapping[int, tuple[torch.Tensor, CudaTensor]], *, on_cpu: bool) -> Any:
    if not isinstance(one, torch.Tensor):
        return one
    if id(one) in known:
        return known[id(one)][1]
    if isinstance(one, AsyncCollectiveTensor):
        return AsyncCollectiveTensor(CudaTensor(one.elem))
    return one if on_cpu else CudaTensor(one)


def check_devices(name: str, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
    """Raises `RuntimeError` where tensors of an operation are on two devices; numbers may be on the CPU."""
    on_cpu = [one for one in tensors if not isinstance(one, CudaTensor)]
    if len(on_cpu) in (0, len(tensors)) or name in COPIES:
        return
    wrong = [one for one in on_cpu if one.dim() > 0]
    if name in INDEXED:
        wrong = [] if isinstance(args[0], CudaTensor) else wrong
    elif name.endswith("_") and args and isinstance(args[0], torch.Tensor) and not isinstance(args[0], CudaTensor):
        wrong = [args[0]]
    if wrong and gpu.mixes is not None:
        gpu.mixes.append(f"{name} in {_line()}")
    elif wrong:
        found = f"found at least two devices, {gpu.device} and cpu! ({name} of {[tuple(one.shape) for one in wrong]})"
        raise RuntimeError(f"Expected all tensors to be on the same device, but {found}")


def note_waits(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor], target: str
) -> None:
    """Notes where the host waits for `gpu`."""
    if name in COPIES:
        later = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        source = args[0] if name == "_to_copy" else args[1]
        there = target if name == "_to_copy" else args[0].device.type
        if source.device.type != there and not later:
            gpu.note("read" if there == "cpu" else "upload", name)
    elif name in READS and any(isinstance(one, CudaTensor) for one in tensors):
        gpu.note("read", name)
    elif name in INDEXED:
        indices = [one for one in args[1] if one is not None]
        if any(not isinstance(one, CudaTensor) for one in indices):
            gpu.note("upload", f"{name} by indices on the CPU")
        if any(one.dtype in (torch.bool, torch.uint8) for one in indices):
            gpu.note("read", f"{name} by a mask")
    elif name == "repeat_interleave" and kwargs.get("output_size") is None:
        gpu.note("read", name)


def _line() -> str:
    """The innermost file and function of the package, or of a test, that is running; torch's, where there is none."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:
        for root in ROOTS:
            if frame.f_code.co_filename.startswith(root) and frame.f_code.co_filename != __file__:
                return f"{frame.f_code.co_filename.removeprefix(root)}:{frame.f_code.co_name}"
    return "torch"

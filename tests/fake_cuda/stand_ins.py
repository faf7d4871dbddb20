"""What `torch.cuda` and NCCL are where a process has the GPU of `tensor`: one stream, in which everything is done
at once.

`device.cpp` is what the C++ half of torch asks for.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from fake_cuda.tensor import CudaMode, CudaTensor, gpu
from torch._decomp.decompositions import _fused_rms_norm_backward
from torch.cuda import _pin_memory_utils
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from evenly.launcher.environment import cpp_compiler

fully_shard_module = import_module("torch.distributed.fsdp._fully_shard._fsdp_init")
MEMORY = 16 * 2**30


def why_not() -> str | None:
    """Why there can be no such GPU here; None where there can."""
    if torch.version.cuda is not None:
        return "torch is built for CUDA"
    if platform.machine() != "x86_64" or cpp_compiler() is None:
        return "needs a C++ compiler on x86-64"
    return None


def built_device(folder: Path) -> Path:
    """`device.cpp` as a library in `folder`. Takes some seconds."""
    root, library = Path(torch.__file__).parent, folder / "device.so"
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{root}/include", f"-L{root}/lib", "-ltorch_cpu", "-lc10"]
    source = Path(__file__).parent / "device.cpp"
    subprocess.run([cpp_compiler() or "", str(source), "-o", str(library), *flags], check=True)
    return library


@contextmanager
def one_gpu(library: Path, *, mixes: list[str] | None = None) -> Iterator[None]:
    """Within, this process uses one GPU, that of its local rank, of eight that torch knows of from then on.

    library: of `built_device`. mixes: gets where tensors of two devices meet, which raises by default.
    """
    index = int(os.environ.get("LOCAL_RANK", "0"))
    gpu.device = torch.device("cuda", index)
    ctypes.CDLL(str(library)).pretend(index)
    _register_kernels()
    before = torch._C._only_lift_cpu_tensors()
    gpu.generator, gpu.mixes = torch.Generator(), mixes
    with ExitStack() as stack:
        for name, stand_in in _cuda().items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        for name in ("pin_memory", "unpin_memory"):
            stack.enter_context(patch.object(_pin_memory_utils, name, lambda *_: None))
        stack.enter_context(patch.object(torch.accelerator, "synchronize", torch.cuda.synchronize))
        stack.enter_context(patch.object(dist, "init_process_group", _over_gloo(dist.init_process_group)))
        stack.enter_context(patch.object(fully_shard_module, "_move_states_to_device", _move))
        stack.enter_context(patch.object(FSDPParam, "reset_sharded_param", _unmoved(FSDPParam.reset_sharded_param)))
        torch._C._set_only_lift_cpu_tensors(True)
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, before)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, False)
        stack.enter_context(CudaMode())
        yield


@cache
def _register_kernels() -> torch.library.Library:
    """Has torch know of kernels that only its builds for CUDA have, so that autograd saves what it does there.

    They run on the CPU, where the first is made of other operations.
    """
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("_fused_rms_norm", torch.ops.aten._fused_rms_norm.default, "CUDA")
    kernels.impl("_fused_rms_norm_backward", _fused_rms_norm_backward, "CPU")
    return kernels


def _move(parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor], device: torch.device) -> None:
    """As `fully_shard` moves them; a tensor on the CPU becomes another kind of object."""
    for tensor in (*parameters, *buffers):
        if tensor.device.type == "cpu":
            moved = tensor.detach().to(device)
            if isinstance(tensor, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, moved)


def _unmoved(reset: Any) -> Any:
    """As `fully_shard` pads its parameters, which asks whether they are plain tensors that it has padded before."""

    def unmoved(parameter: Any) -> None:
        kept, own = parameter._sharded_param_data, parameter.sharded_param._local_tensor
        if not isinstance(kept, CudaTensor) or kept.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
            reset(parameter)

    return unmoved


def _over_gloo(init: Any) -> Any:
    def connect(backend: str, *, device_id: Any = None, **options: Any) -> None:
        init("gloo", **options)

    return connect


class Stream:
    """The one stream."""

    cuda_stream, device_type = 0, 1

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.device_index = gpu.device, gpu.device.index

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None:
        gpu.note("synchronize", "Stream.synchronize")

    def query(self) -> bool:
        return True


class Event:
    """One that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, _: Any = None) -> None: ...

    def wait(self, _: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        gpu.note("synchronize", "Event.synchronize")


def _cuda() -> dict[str, Any]:
    """What `torch.cuda` has."""
    stream = Stream()
    bytes_of = {name: lambda *_, **__: 0 for name in ("memory_allocated", "max_memory_allocated", "memory_reserved")}
    nothing = {
        name: lambda *_, **__: None
        for name in ("_lazy_init", "init", "set_device", "empty_cache", "reset_peak_memory_stats", "manual_seed_all")
    }
    return {
        **bytes_of,
        **nothing,
        "_initialized": True,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: gpu.device.index,
        "default_generators": (gpu.generator,) * 8,
        "get_rng_state": lambda *_: gpu.generator.get_state(),
        "set_rng_state": lambda state, *_: gpu.generator.set_state(state),
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=MEMORY, name="pretended", major=8, minor=0),
        "get_device_name": lambda *_: "pretended",
        "mem_get_info": lambda *_: (MEMORY, MEMORY),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *_: gpu.note("synchronize", "torch.cuda.synchronize"),
        "Stream": Stream,
        "Event": Event,
        "stream": lambda *_: nullcontext(),
        "device": lambda *_: nullcontext(),
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
    }

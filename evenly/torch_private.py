"""Every name of torch that torch does not promise to keep: a new torch is a review of this file and of its test.

What is relied on stands with each name; `tests/test_torch_private.py` holds it against the torch that is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# ------------------------------------------------------------------------------------------------ operators of aten
_aten = torch.ops.aten
# Attention by kernel. (query, key) are the first two arguments; of a backward the second and third.
ATTENTION_ON_CPU = _aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD_ON_CPU = _aten._scaled_dot_product_flash_attention_for_cpu_backward
ATTENTION = (
    ATTENTION_ON_CPU,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
)
ATTENTION_BACKWARD = (
    ATTENTION_BACKWARD_ON_CPU,
    _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward,
)
TO_COPY = _aten._to_copy  # `.to()` of another type or device
PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution, _aten.convolution_backward)
GROUPED_PRODUCT = "_grouped_mm"  # what `torch.nn.functional.grouped_mm` calls, and interceptors of functions see
UNSAFE_VIEW, RESHAPE_ALIAS = _aten._unsafe_view, _aten._reshape_alias  # views that are none by their schema
# Functions of lists of tensors -> the name of the same function of one.
FOREACH: dict[Any, str] = {getattr(torch, name): name[9:] for name in dir(torch) if name.startswith("_foreach_")}
add_to_each, copy_to_each, divide_each = torch._foreach_add_, torch._foreach_copy_, torch._foreach_div_  # pyright: ignore
norm_of_each, scale_each = torch._foreach_norm, torch._foreach_mul_  # pyright: ignore
engine_backward: Any = torch.autograd.graph._engine_run_backward  # pyright: ignore  # modes stay within
PACK_PADDED_SEQUENCE = _aten._pack_padded_sequence
PACKED_SEQUENCES = ("_pack_padded_sequence", "_pad_packed_sequence")  # as interceptors of functions see them
DEVICE_OF = torch.ops.prim.device.default  # of a fake tensor, asked by autograd in each of its operations


class PlainDispatchMode(TorchDispatchMode):
    """A mode whose handler torch does not hide from its compiler, which takes longer than the handler itself."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# ------------------------------------------------------------------------------------------- subclasses of tensors
# Within, tensors of subclasses are to Python what they are in memory; no subclass's `__torch_function__` is called.
without_subclasses: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass  # pyright: ignore
# Within, no mode's is called either; nor are modes that intercept operations, within the second.
without_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunction  # pyright: ignore
without_dispatch_modes: Callable[[], AbstractContextManager[Any]] = torch.utils._python_dispatch._disable_current_modes  # pyright: ignore
# The inverse of the first two, within them.
with_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C._EnableTorchFunction  # pyright: ignore


def wrapper_subclass(cls: type[torch.Tensor], form: torch.Tensor) -> Any:
    """A tensor of class `cls` that wraps no numbers, of the shape, strides, type and device of `form`."""
    given: Any = dict(strides=form.stride(), dtype=form.dtype, device=form.device, requires_grad=form.requires_grad)
    return torch.Tensor._make_wrapper_subclass(cls, form.shape, **given)  # pyright: ignore


def version(tensor: torch.Tensor) -> int:
    """How often the tensor, or one that shares its memory, was changed in place."""
    return tensor._version


def memory_key(tensor: torch.Tensor) -> int:
    """Which memory a tensor has, or would have if it is fake: equal for tensors that share it."""
    with without_subclasses():  # of a tensor that is split, its part's: a job's code may not ask, the engine may
        return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def memory_bytes(tensor: torch.Tensor) -> int:
    """The size of that memory, which a view has in common with its base."""
    with without_subclasses():
        return tensor.untyped_storage().nbytes()


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own to ask for: sparse tensors, oneDNN's and those under vmap have none."""
    return torch._C._has_storage(tensor)  # pyright: ignore


# ---------------------------------------------------------------------------------------------------- fake tensors
def fake_mode(*, cached: bool = True) -> Any:
    """torch's mode of fake tensors, in which tensors of other kinds may take part; cached: whether it keeps results."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # a second, which a plain run does not need

    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled &= cached
    return mode


def fake_form(tensor: Any) -> tuple[Any, ...] | None:
    """All that operations see of a fake tensor: shape, strides, offset, type, device; None where it has more to it."""
    if tensor.constant is not None or tensor.layout is not torch.strided or tensor.is_complex() or tensor.is_neg():
        return None
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device


class FakeMaker:
    """Makes fake tensors of `mode` from their forms, in a tenth of the time that operations on others take to."""

    def __init__(self, mode: Any) -> None:
        from torch._subclasses.fake_tensor import FakeTensor

        self.kind: Any = FakeTensor
        self._mode = mode
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # all that torch keeps of one that is nothing more

    def make(self, form: tuple[Any, ...], storage: Any = None) -> Any:
        """A tensor of `form` with memory of its own, or with that of `storage`. Within a mode's handler only."""
        shape, strides, offset, dtype, device = form
        with torch._C._DisableTorchDispatch():  # pyright: ignore
            if storage is None:
                bare = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            else:
                bare: Any = torch.empty(0, dtype=dtype, device="meta")
                bare.set_(storage, offset, shape, strides)
        if device not in self._attributes:
            self._attributes[device] = dict(vars(self.kind(self._mode, bare, device)))
        subclass: Any = torch.Tensor._make_subclass  # pyright: ignore
        made = subclass(self.kind, bare, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(made)  # pyright: ignore
        vars(made).update(self._attributes[device])
        return made

    def makes(self, tensor: Any, form: tuple[Any, ...], storage: Any) -> bool:
        if (storage is None and form[2]) or type(tensor) is not self.kind or tensor.requires_grad:
            return False
        made, keys = self.make(form, storage), torch._C._dispatch_key_set  # pyright: ignore
        sizes = {one.untyped_storage().nbytes() for one in (made, tensor)}
        return keys(made) == keys(tensor) and len(sizes) == 1 and vars(made) == vars(tensor)


def without_fake_mode() -> AbstractContextManager[Any]:
    """A context within which no mode of fake tensors is active: tensors are made with numbers."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """What `torch.func` made the tensor of by `vmap` or `grad`; the tensor itself outside of them."""
    functorch: Any = torch._C._functorch  # pyright: ignore
    return functorch.get_unwrapped(tensor) if functorch.is_functorch_wrapped_tensor(tensor) else tensor


@contextmanager
def as_one_graph() -> Generator[None]:
    """Within, a compiled function that cannot be one graph raises `graph_errors()` before anything of it has run.

    Functions of numpy are in no graph: torch would draw from its own generator in place of numpy's.
    """
    from torch._dynamo import config, error_on_graph_break  # torch's compiler, which takes seconds to import

    with error_on_graph_break(True), config.patch(trace_numpy=False), torch.compiler.set_stance("default"):
        yield


def graph_errors() -> type[Exception]:
    """What is raised where torch cannot make a graph of a function, or no code of the graph."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def function_modes() -> list[Any]:
    """The modes that are asked in place of functions of torch, the innermost last."""
    return torch.overrides._get_current_function_mode_stack()  # pyright: ignore


@contextmanager
def without_function_mode(kind: type) -> Generator[None]:
    """Within, the innermost mode for functions is not asked if it is of `kind`."""
    modes = function_modes()
    if not modes or not isinstance(modes[-1], kind):
        yield
        return
    with torch.overrides._pop_mode_temporarily():  # pyright: ignore
        yield


# What transformation of `torch.func` (vmap, grad, jvp ...) is running, or None.
in_transform: Callable[[], object] = torch._C._functorch.peek_interpreter_stack  # pyright: ignore


def apply_outside_transforms(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Its `apply` without what torch does there for transformations of `torch.func`: not for use within one."""
    return super(torch.autograd.Function, function).apply  # pyright: ignore


def outside_transforms() -> AbstractContextManager[Any]:
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


@cache
def change_transformed(kind: type, change: Callable[[Any], torch.Tensor]) -> None:
    """From now on transformations of `torch.func` take `change` of a tensor of class `kind` in its place.

    They wrap their tensors below torch's functions, where a class is lost that functions would have asked.
    """
    from torch._functorch import eager_transforms, vmap

    homes: list[tuple[Any, str]] = [(vmap, "_add_batch_dim"), (eager_transforms, "_wrap_for_grad")]
    for home, name in homes:
        setattr(home, name, partial(_wrap_changed, getattr(home, name), kind, change))


def _wrap_changed(wrap: Any, kind: type, change: Callable[[Any], torch.Tensor], tensor: Any, *args: Any) -> Any:
    return wrap(change(tensor) if isinstance(tensor, kind) else tensor, *args)


def subclass_of(cls: type[torch.Tensor], kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """What a tensor of class `kind` may change its class to: to functions it is of `cls`, to operators what it was."""
    return _with_operators_of(cls, next(base for base in kind.__mro__ if "__torch_dispatch__" in vars(base)))


@cache
def _with_operators_of(cls: type[torch.Tensor], kind: Any) -> type[torch.Tensor]:
    return cls if kind is torch.Tensor else type(f"{kind.__name__}As{cls.__name__}", (cls, kind), {})


@cache
def is_fake(kind: type) -> bool:
    """Whether tensors of this class are torch's fake tensors, which take no memory."""
    return any(base.__name__ == "FakeTensor" for base in kind.__mro__)


def operation_of(problem: Exception) -> str:
    """The operation that a fake tensor could not run for want of values; '' where something else went wrong."""
    operation = getattr(problem, "func", None)  # torch's errors of fake tensors have it, and no other
    return "" if operation is None else str(operation).removesuffix(".default")


FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"  # logs what it raises too


@contextmanager
def masks_not_compared() -> Generator[None]:
    """Within, `nn.TransformerEncoder` and `nn.TransformerDecoder` take a mask as it is.

    They would look at its values, only to find whether it could be left out for being causal.
    """
    home: Any = nn.modules.transformer
    before = home._detect_is_causal_mask
    home._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True  # pyright: ignore
    try:
        yield
    finally:
        home._detect_is_causal_mask = before


# --------------------------------------------------------------------------------------------------------- modules
TensorDict = Literal["_parameters", "_buffers"]  # where `nn.Module` looks its tensors up


def tensor_dict(module: nn.Module, kind: TensorDict) -> dict[str, Any]:
    """The module's own parameters or buffers, those that are None among them."""
    return getattr(module, kind)


def set_tensor_dict(module: nn.Module, kind: TensorDict, tensors: Mapping[str, Any]) -> None:
    """Has `module` look its parameters or buffers up in `tensors`, a kind of dict."""
    setattr(module, kind, tensors)


COMPILED = "_orig_mod"  # the module that another, which `torch.compile` has made of it, has inside
WRAPPERS = (f"{COMPILED}.", "_checkpoint_wrapped_module.")  # parts that torch's wrappers put into names


def plain_name(name: str) -> str:
    """A name of a module, parameter or buffer without the parts of torch's wrappers."""
    for part in WRAPPERS:
        name = name.replace(part, "")
    return name


def has_hooks(module: nn.Module) -> bool:
    """Whether anything runs before or after its own forward or backward."""
    one: Any = module
    return bool(one._forward_pre_hooks or one._forward_hooks or one._backward_pre_hooks or one._backward_hooks)


def forward_hooks(module: nn.Module) -> tuple[list[tuple[Any, bool]], list[tuple[Any, bool]]]:
    """What runs before its forward, and after it, in order; each with whether it takes keyword arguments."""
    every: Any = nn.modules.module
    one: Any = module
    pre = {**every._global_forward_pre_hooks, **one._forward_pre_hooks}
    post = {**every._global_forward_hooks, **one._forward_hooks}
    with_kwargs = {**every._global_forward_hooks_with_kwargs, **one._forward_hooks_with_kwargs}
    return (
        [(hook, number in one._forward_pre_hooks_with_kwargs) for number, hook in pre.items()],
        [(hook, number in with_kwargs) for number, hook in post.items()],
    )


def has_hooks_for_all_ends(module: nn.Module) -> bool:
    """Whether hooks of it want to run where its forward raises, or where a gradient has passed it as a whole."""
    one: Any = module
    return bool(one._forward_hooks_always_called or one._backward_hooks or one._backward_pre_hooks)


def renewed_attributes(module: nn.Module) -> tuple[str, ...]:
    """Those that keep its parameters too, and that each forward renews where their names have others."""
    return ("_flat_weights",) if isinstance(module, nn.RNNBase) else ()


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether anything runs before or after its steps, of this optimizer alone or of all."""
    own: Any = optimizer
    home: Any = sys.modules[torch.optim.Optimizer.__module__]  # `torch.optim` hides it
    of_all = home._global_optimizer_pre_hooks or home._global_optimizer_post_hooks
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # some wrappers of optimizers have none
    return bool(any(getattr(own, name, None) for name in names) or of_all)


def gradient_hooks(parameter: Any) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    """Return the hooks that see, and may change, the gradient of each backward, in order."""
    return [*(parameter._backward_hooks or {}).values()]


def replace_gradient_hooks(parameter: Any, hooks: Sequence[Callable[[torch.Tensor], torch.Tensor | None]]) -> None:
    """Has these hooks see its gradient in place of its own."""
    parameter._backward_hooks.clear()
    for hook in hooks:
        parameter.register_hook(hook)


def has_accumulated_hooks(parameter: Any) -> bool:
    """Whether any hook sees the gradient after it was added to what is there."""
    return bool(parameter._post_accumulate_grad_hooks)


def wrap_call(module: nn.Module, call: Callable[..., Any]) -> Any:
    """Has `call(run, *args, **kwargs)` run in place of each call, hooks included; returns what `unwrap_call` wants.

    `run` is what `module.compile()` has put there, else all that a call of a module does.
    """
    before: Any = module._compiled_call_impl  # pyright: ignore[reportPrivateUsage]
    run: Any = before or module._call_impl  # pyright: ignore[reportPrivateUsage]
    module._compiled_call_impl = partial(call, run)  # pyright: ignore[reportPrivateUsage]
    return before


def unwrap_call(module: nn.Module, before: Any) -> None:
    """Undoes `wrap_call`."""
    module._compiled_call_impl = before  # pyright: ignore[reportPrivateUsage]


def in_backward() -> bool:
    return backward_number() != -1


def autograd_node() -> tuple[str, int] | None:
    """(name, number) of the node of the graph whose backward runs in this thread; None outside of a backward."""
    node: Any = torch._C._current_autograd_node()  # pyright: ignore
    return None if node is None else (node.name(), node._sequence_nr())


def next_node_number() -> int:
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore


def nodes_of(tensor: torch.Tensor, first: int) -> list[Any]:
    """The nodes that computed `tensor`, and what it is a view of, as far as their numbers are `first` or larger."""
    nodes: list[Any] = [one.grad_fn for one in (tensor, tensor._base) if one is not None]
    return [node for node in nodes if node is not None and node._sequence_nr() >= first]


def backward_number() -> int:
    """Which backward autograd is running in this thread, each with a number of its own; -1 outside of any."""
    return torch._C._current_graph_task_id()  # pyright: ignore


# The power iteration of `torch.nn.utils.parametrizations.spectral_norm`, one for each call in training: in place of
# the buffers `_u` and `_v`, which `SPECTRAL_VECTORS` names, from them and the weight it is given.
SpectralNormOfWeight = parametrizations._SpectralNorm  # pyright: ignore[reportPrivateUsage]
SPECTRAL_VECTORS = ("_u", "_v")
ORIGINAL = "_orig"  # ends the name of the parameter that the hook `torch.nn.utils.spectral_norm` computes a weight from


# ---------------------------------------------------------------------------------------------------- distributed
# Renamed in torch 2.13, which warns about the older name.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor")  # noqa: B009
PROCESS_GROUPS: Any = dist.distributed_c10d._world  # pyright: ignore  # torch's table of them


def replace_process_groups(kind: type, default_group: Callable[..., Any], rendezvous: Callable[..., Any]) -> None:
    """Give the table the class `kind`, and have these functions, given torch's own, called in place of torch's."""
    home: Any = dist.distributed_c10d
    PROCESS_GROUPS.__class__ = kind
    home._get_default_group = partial(default_group, home._get_default_group)
    home.rendezvous = partial(rendezvous, home.rendezvous)


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a DTensor: none is where nobody has imported these, which takes a while."""
    home: Any = sys.modules.get("torch.distributed.tensor")
    return home is not None and isinstance(tensor, home.DTensor)


def dtensor_like(template: Any, rows: torch.Tensor) -> Any:
    """A DTensor like `template` with the local part `rows`, on their own device, where `from_local` would move them."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    form = TensorMeta(template.shape, template.stride(), rows.dtype)
    return DTensor(rows, DTensorSpec(template.device_mesh, template.placements, form), requires_grad=rows.requires_grad)


def begin_all_gather(handle: Any, whole: torch.Tensor, own: torch.Tensor) -> Any:
    """The work of `all_gather_single` in the process group `handle`, without what torch's function does around it."""
    return (getattr(handle, "all_gather_single", None) or handle._allgather_base)(whole, own)


@cache
def keep_unused_inputs() -> None:
    """Lets an input that a unit of `fully_shard` does not use have none; by zeros its makers would be stepped."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction as function

    name = "setup_context" if "setup_context" in vars(function) else "forward"  # of torch before 2.13
    before = getattr(function, name)

    def taking_context(ctx: Any, *args: Any) -> Any:
        ctx.set_materialize_grads(False)
        return before(ctx, *args)

    setattr(function, name, staticmethod(taking_context))


def hide_sharding(model: nn.Module) -> None:
    """Takes off the modules of a model under `fully_shard` what tells their code of it.

    Models of transformers run otherwise where they find it: blocks that layer drop leaves out, for one.
    """
    for module in model.modules():
        vars(module).pop("_is_fsdp_managed_module", None)  # which torch reads where it compiles, and need not


def sets_gradients(function: Any) -> bool:
    """Whether a function that a mode sees is what `torch.no_grad` and its like call."""
    return function is torch._C._set_grad_enabled  # pyright: ignore[reportPrivateUsage]


def initialize_sharding(model: nn.Module) -> None:
    """What the first forward of a model under `fully_shard` would do, before it."""
    _fsdp_state(model)._lazy_init()


def end_sharded_forward(model: nn.Module, outputs: Sequence[Any]) -> list[Any]:
    """What ends the forward of a model under `fully_shard`, where its code ended by an exception with these outputs."""
    return [*_fsdp_state(model)._post_forward(model, (), tuple(outputs))]


def begin_sharded_backward(unit: nn.Module) -> None:
    """What begins the backward of a unit of `fully_shard`: gathers its parameters if they are not; once is enough."""
    _fsdp_state(unit)._pre_backward(None)


def reduce_sharded(model: nn.Module) -> None:
    """Reduces and cuts the gradients of all units, as the end of the last backward would."""
    state = _fsdp_state(model)
    for one in state._state_ctx.all_states:
        for group in one._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()


def _fsdp_state(model: nn.Module) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard.state(model)  # pyright: ignore

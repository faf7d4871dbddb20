"""What is relied on of torch's private names holds for the torch that is installed: a test for each."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
from kept_ranks import KeptRanks, RankFailure, group_of_all
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim.optimizer import register_optimizer_step_pre_hook

from evenly import torch_private
from evenly.torch_private import (
    ATTENTION,
    ATTENTION_BACKWARD,
    ATTENTION_BACKWARD_ON_CPU,
    ATTENTION_ON_CPU,
    COMPILED,
    DEVICE_OF,
    FAKE_TENSOR_LOGGER,
    FOREACH,
    GROUPED_PRODUCT,
    ORIGINAL,
    PACK_PADDED_SEQUENCE,
    PACKED_SEQUENCES,
    PROCESS_GROUPS,
    PRODUCTS,
    RESHAPE_ALIAS,
    SPECTRAL_VECTORS,
    TO_COPY,
    UNSAFE_VIEW,
    WRAPPERS,
    FakeMaker,
    PlainDispatchMode,
    SpectralNormOfWeight,
    TorchDispatchMode,
    add_to_each,
    all_gather_single,
    apply_outside_transforms,
    as_one_graph,
    autograd_node,
    backward_number,
    begin_all_gather,
    begin_sharded_backward,
    change_transformed,
    copy_to_each,
    divide_each,
    dtensor_like,
    end_sharded_forward,
    engine_backward,
    fake_form,
    fake_mode,
    forward_hooks,
    function_modes,
    gradient_hooks,
    graph_errors,
    has_accumulated_hooks,
    has_hooks,
    has_hooks_for_all_ends,
    has_memory,
    has_step_hooks,
    hide_sharding,
    in_backward,
    in_transform,
    initialize_sharding,
    is_dtensor,
    is_fake,
    keep_unused_inputs,
    masks_not_compared,
    memory_bytes,
    memory_key,
    next_node_number,
    nodes_of,
    norm_of_each,
    operation_of,
    outside_transforms,
    plain_name,
    reduce_scatter_single,
    reduce_sharded,
    renewed_attributes,
    replace_gradient_hooks,
    replace_process_groups,
    scale_each,
    set_tensor_dict,
    sets_gradients,
    subclass_of,
    tensor_dict,
    unwrap_call,
    unwrapped,
    version,
    with_torch_function,
    without_dispatch_modes,
    without_fake_mode,
    without_function_mode,
    without_subclasses,
    without_torch_function,
    wrap_call,
    wrapper_subclass,
)


class Seen(TorchDispatchMode):
    """Notes which operations run within."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func.overloadpacket, args))
        return func(*args, **(kwargs or {}))

    @property
    def packets(self) -> list[Any]:
        return [packet for packet, _ in self.calls]


def test_each_name_has_a_test() -> None:
    tree = ast.parse(Path(torch_private.__file__).read_text(encoding="utf-8"))
    names = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
    names |= {
        one.id
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for one in ast.walk(node)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }
    used = {node.id for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8"))) if hasattr(node, "id")}
    public = {name for name in names if not name.startswith("_")} - {"TensorDict"}
    assert public - used == set()


# ------------------------------------------------------------------------------------------------ operators of aten
def test_attention_on_the_cpu_by_its_operators() -> None:
    query = torch.randn(2, 3, 5, 4, requires_grad=True)
    key = torch.randn(2, 3, 7, 4)
    with Seen() as seen:
        F.scaled_dot_product_attention(query, key, key).sum().backward()
    forward = next(args for packet, args in seen.calls if packet is ATTENTION_ON_CPU)
    backward = next(args for packet, args in seen.calls if packet is ATTENTION_BACKWARD_ON_CPU)
    assert [one.shape for one in forward[:2]] == [query.shape, key.shape]
    assert [one.shape for one in backward[1:3]] == [query.shape, key.shape]


@pytest.mark.parametrize("kernel", [*ATTENTION, *ATTENTION_BACKWARD], ids=str)
def test_kernels_of_attention_exist(kernel: Any) -> None:
    assert "default" in kernel.overloads()
    names = [one.name for one in kernel.default._schema.arguments[:3]]
    assert names[names.index("query") + 1] == "key"
    assert names.index("query") == (kernel in ATTENTION_BACKWARD)


def test_a_copy_in_another_type() -> None:
    with Seen() as seen:
        torch.ones(3).to(torch.float64)
    assert seen.packets[1:] == [TO_COPY]


def test_products_of_matrices_and_convolutions() -> None:
    x = torch.ones(2, 3, 3, requires_grad=True)
    with Seen() as seen:
        for product in (x @ x, x[0] @ x[0], nn.Linear(3, 3)(x), nn.Conv1d(3, 3, 1)(x), x[0].addmm(x[0], x[1])):
            product.sum().backward()
        torch.baddbmm(x, x, x)
    assert {*PRODUCTS} <= {*seen.packets}


def test_views_that_are_none_by_their_schema() -> None:
    with Seen() as seen:
        (torch.ones(2, 3, 4) @ torch.ones(4, 5)).shape  # noqa: B018
    assert UNSAFE_VIEW in seen.packets
    for packet in (UNSAFE_VIEW, RESHAPE_ALIAS):
        tensor = torch.ones(6)
        arguments = ([2, 3], [3, 1]) if packet is RESHAPE_ALIAS else ([2, 3],)
        assert packet.default(tensor, *arguments).data_ptr() == tensor.data_ptr()
        assert not packet.default.is_view or packet is RESHAPE_ALIAS


def test_packing_sequences_by_its_operator() -> None:
    with Seen() as seen:
        nn.utils.rnn.pack_padded_sequence(torch.ones(4, 2, 3), torch.tensor([4, 2]))
    assert PACK_PADDED_SEQUENCE in seen.packets


# ------------------------------------------------------------------------------------------- subclasses of tensors
class Doubled(torch.Tensor):
    """Its sum is twice what it is."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_subclasses():
            result = func(*args, **(kwargs or {}))
            return 2 * result if func is torch.sum else result


class Tripled(torch.overrides.TorchFunctionMode):
    """Within, sums are three times what they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (3 if func is torch.sum else 1) * func(*args, **(kwargs or {}))


def test_operations_past_modes() -> None:
    with Seen() as seen:
        torch.ones(2).add_(1)
        with without_dispatch_modes():
            torch.ones(2).mul_(2)
        torch.ones(2).sub_(1)
    names = [packet.__name__ for packet in seen.packets]
    assert [name for name in names if name.endswith("_")] == ["add_", "sub_"]


def test_subclasses_without_and_with_their_functions() -> None:
    tensor = torch.ones(2)
    tensor.__class__ = Doubled
    assert torch.sum(tensor) == 4
    with without_subclasses():
        assert torch.sum(tensor) == 2
        with with_torch_function():
            assert torch.sum(tensor) == 4
    with Tripled():
        with without_subclasses():
            assert torch.sum(tensor).item() == 6
        with without_torch_function():
            assert torch.sum(tensor) == 2
            with with_torch_function():
                assert torch.sum(torch.ones(2)).item() == 6


def test_a_tensor_that_wraps_no_numbers() -> None:
    class Empty(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError

    form = torch.ones(3, 4, dtype=torch.bfloat16).t().requires_grad_()
    made = wrapper_subclass(Empty, form)
    assert type(made) is Empty
    same = [(one.shape, one.stride(), one.dtype, one.device, one.requires_grad) for one in (made, form)]
    assert same[0] == same[1]


def test_a_version_counts_changes_in_place() -> None:
    tensor = torch.ones(3)
    before = version(tensor)
    tensor[1:].add_(1)
    assert version(tensor) == before + 1
    tensor + 1
    assert version(tensor) == before + 1


class Refusing(torch.Tensor):
    """Of no function, as a split tensor is of those that ask for its memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_memory_is_asked_of_what_a_subclass_has() -> None:
    plain = torch.ones(4)
    refusing = plain.as_subclass(Refusing)
    assert memory_key(refusing) == memory_key(plain) and memory_bytes(refusing) == memory_bytes(plain[1:]) == 16
    with pytest.raises(NotImplementedError):
        refusing.untyped_storage()


def test_memory_by_its_key() -> None:
    with fake_mode():
        fake = torch.ones(4, 2)
        assert memory_key(fake) == memory_key(fake.t()) != memory_key(fake.clone())
    tensor = torch.ones(4, 2)
    assert memory_key(tensor) == memory_key(tensor[1:]) != memory_key(tensor.clone())


def test_which_tensors_have_memory() -> None:
    with fake_mode():
        assert has_memory(torch.ones(2))
    assert has_memory(torch.ones(2)[1:]) and has_memory(nn.Parameter(torch.ones(0)))
    assert not has_memory(torch.eye(2).to_sparse()) and not has_memory(torch.ones(2, 2).to_mkldnn())


# ---------------------------------------------------------------------------------------------------- fake tensors
def test_what_vmap_wraps_is_the_tensor_that_it_was_given() -> None:
    given, seen = torch.ones(3, 2), list[torch.Tensor]()
    torch.func.vmap(lambda x: seen.append(unwrapped(x)) or x)(given)
    assert seen[0] is given and unwrapped(given) is given


class Lost(torch.Tensor):
    """A class that transformations would lose."""


def twice(tensor: torch.Tensor) -> torch.Tensor:
    with outside_transforms():
        return tensor.as_subclass(torch.Tensor) * 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_transformations_take_what_a_class_is_changed_to() -> None:
    change_transformed(Lost, twice)
    given = torch.ones(3).as_subclass(Lost)
    assert torch.func.vmap(lambda x: x * 1)(given).tolist() == [2, 2, 2]
    assert torch.func.grad(lambda x: (x * x).sum())(given).tolist() == [4, 4, 4]
    assert torch.func.jvp(lambda x: x * 1, (torch.ones(2),), (torch.ones(2),))[1].tolist() == [1, 1]


def test_a_function_applied_outside_of_transformations_is_as_any_other() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
            ctx.factor = factor
            return x * factor

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return gradients[0] * ctx.factor, None

    x = torch.ones(3, requires_grad=True)
    result = apply_outside_transforms(Doubled)(x, 2.0)
    result.sum().backward()
    assert result.tolist() == [2, 2, 2] and x.grad is not None and x.grad.tolist() == [2, 2, 2]


def test_within_a_transformation_one_can_compute_outside() -> None:
    seen: list[Any] = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        with outside_transforms():
            seen.append(bool(in_transform()))
        seen.append(bool(in_transform()))
        return x * 2

    torch.func.vmap(inside)(torch.ones(2))
    assert seen == [False, True] and not in_transform()


def test_what_cannot_be_one_graph_has_not_begun_to_run() -> None:
    ran: list[str] = []

    def begun(x: torch.Tensor) -> torch.Tensor:
        ran.append("begun")
        return x if x.sum().item() > 0 else -x

    function = torch.compile(begun, backend="eager")
    with as_one_graph(), pytest.raises(graph_errors()):
        function(torch.ones(2))
    assert not ran
    with as_one_graph():
        assert torch.compile(lambda x: x * 2, backend="eager")(torch.ones(1)).tolist() == [2]
    assert function(torch.ones(1)).tolist() == [1] and ran == ["begun"]
    drawn = torch.compile(lambda x: x * numpy.random.random(), backend="eager")
    with as_one_graph(), pytest.raises(graph_errors()):
        drawn(torch.ones(1))


def test_the_innermost_mode_for_functions_is_left_out() -> None:
    class Outer(torch.overrides.TorchFunctionMode):
        pass

    class Inner(Outer):
        pass

    with Outer() as outer, Inner() as inner:
        assert function_modes() == [outer, inner]
        with without_function_mode(Inner):
            assert function_modes() == [outer]
            with without_function_mode(Inner):
                assert function_modes() == [outer]
        assert function_modes() == [outer, inner]
    assert function_modes() == []


def test_functions_of_lists_have_the_names_of_those_of_one_tensor() -> None:
    assert {"norm", "mul_", "addcmul_", "lerp_", "copy_", "zero_"} <= {*FOREACH.values()}


def test_a_grouped_product_is_seen_under_its_private_name() -> None:
    seen = list[str]()

    class Names(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x, weight, ends = torch.ones(4, 8), torch.ones(2, 8, 16), torch.tensor([1, 4], dtype=torch.int32)
    with Names():
        F.grouped_mm(x, weight, offs=ends)
    assert GROUPED_PRODUCT in seen and hasattr(torch, GROUPED_PRODUCT)


def test_tensors_with_numbers_are_made_within_a_fake_mode() -> None:
    with fake_mode():
        with without_fake_mode():
            assert torch.ones(2).sum().item() == 2
        assert is_fake(type(torch.ones(2)))


def test_fake_tensors_are_known_and_take_real_ones_along() -> None:
    with fake_mode():
        fake = torch.ones(3)
        assert is_fake(type(fake))
        assert is_fake(type(fake + torch.ones(3)))
        assert not is_fake(torch.Tensor)


def test_fake_tensors_of_a_form_are_those_that_torch_makes() -> None:
    mode = fake_mode()
    maker = FakeMaker(mode)
    with mode:
        base = torch.ones(3, 4, dtype=torch.float16)
        for fake, storage in ((base, None), (base.t()[1:], base.untyped_storage()), (torch.ones(()), None)):
            form = fake_form(fake)
            assert form == (fake.shape, fake.stride(), fake.storage_offset(), fake.dtype, torch.device("cpu"))
            made = maker.make(form, storage)
            assert maker.makes(fake, form, storage) and fake_form(made) == form and vars(made) == vars(fake)
            assert (memory_key(made) == memory_key(fake)) == (storage is not None)
            assert is_fake(type(made + 1)) and (made + 1).shape == fake.shape
        assert not maker.makes(base[:2], fake_form(base[:2]) or (), None)  # which has a larger memory
        complexes = torch.ones(2, dtype=torch.complex64)
        assert fake_form(complexes) is None and fake_form(torch.tensor(3)) is None  # whose number torch keeps


def test_a_dtensor_is_known_by_its_class() -> None:
    from torch.distributed.tensor import DTensor

    assert is_dtensor(wrapper_subclass(DTensor, torch.ones(2))) and not is_dtensor(torch.ones(2))


def test_a_plain_mode_is_asked_for_devices_of_fake_tensors_and_stays_out_of_the_compiler() -> None:
    asked: list[Any] = []

    class Plain(PlainDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            if func is DEVICE_OF:
                return args[0].__torch_dispatch__(func, types, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    with fake_mode():
        fake = torch.ones(3, requires_grad=True)
        with Plain():
            (fake * 2).sum().backward()
            assert fake.grad is not None and fake.grad.device == torch.device("cpu")
    assert DEVICE_OF in asked and torch.ops.aten.mul.Tensor in asked
    assert Plain.__torch_dispatch__.__code__.co_name == "__torch_dispatch__"  # and not that of what hides handlers


def test_a_fake_tensor_becomes_one_of_a_subclass_and_stays_fake() -> None:
    class Doubling(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with without_subclasses():
                return func(*args, **(kwargs or {})) * 2

    with fake_mode():
        weight = torch.ones(3, requires_grad=True)
        fake = weight * 1
        fake.__class__ = subclass_of(Doubling, type(fake))
        assert is_fake(type(fake)) and isinstance(fake, Doubling) and subclass_of(Doubling, type(fake)) is type(fake)
        result = fake + torch.ones(2, 3)
        assert is_fake(type(result)) and result.shape == (2, 3)
        result.sum().backward()
    assert weight.grad is not None and is_fake(type(weight.grad))


def test_an_operation_that_needs_values_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with fake_mode():
        fake = torch.ones(3)
        with pytest.raises(RuntimeError) as caught:
            fake.nonzero().tolist()
    assert "aten" in operation_of(caught.value) or "nonzero" in str(caught.value)
    assert operation_of(ValueError("of the user's")) == ""
    assert FAKE_TENSOR_LOGGER in logging.root.manager.loggerDict


def test_masks_are_not_compared_within() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    inputs, mask = torch.ones(1, 4, 8), torch.zeros(4, 4)
    with Seen() as seen, masks_not_compared():
        encoder(inputs, mask=mask)
    assert torch.ops.aten.eq not in seen.packets
    with Seen() as seen:
        encoder(inputs, mask=mask)
    assert torch.ops.aten.eq in seen.packets


# --------------------------------------------------------------------------------------------------------- modules
def test_where_modules_look_their_tensors_up() -> None:
    norm = nn.BatchNorm1d(3, affine=True)
    assert [*tensor_dict(norm, "_parameters")] == ["weight", "bias"]
    assert [*tensor_dict(norm, "_buffers")] == ["running_mean", "running_var", "num_batches_tracked"]
    other = nn.Parameter(torch.zeros(3))
    set_tensor_dict(norm, "_parameters", {"weight": other, "bias": None})
    assert norm.weight is other
    assert [*norm.named_parameters()] == [("weight", other)]


class Names(torch.overrides.TorchFunctionMode):
    """Notes the names of functions that are called within."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_names_of_functions_of_packed_sequences() -> None:
    with Names() as names:
        packed = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 3, 1), torch.tensor([3, 1]), batch_first=True)
        nn.utils.rnn.pad_packed_sequence(packed)
    assert names.seen.issuperset(PACKED_SEQUENCES)


def test_recurrent_layers_renew_what_they_keep_of_their_parameters() -> None:
    for layer in (nn.LSTM(2, 3), nn.GRU(2, 3, bidirectional=True)):
        (kept,) = renewed_attributes(layer)
        weight: Any = layer.weight_hh_l0
        assert any(one is weight for one in getattr(layer, kept))
        layer._parameters["weight_hh_l0"] = other = nn.Parameter(weight.detach() + 1)
        assert not any(one is other for one in getattr(layer, kept))
        layer(torch.ones(1, 1, 2))
        assert any(one is other for one in getattr(layer, kept)) and not any(
            one is weight for one in getattr(layer, kept)
        )
    assert renewed_attributes(nn.Linear(2, 2)) == ()


def test_hooks_of_a_module_and_of_a_parameter() -> None:
    linear, other = nn.Linear(2, 2), nn.Linear(2, 2)
    first, second, every = (lambda *_: None for _ in range(3))
    assert forward_hooks(linear) == ([], []) and not has_hooks_for_all_ends(linear)
    linear.register_forward_pre_hook(second)
    linear.register_forward_pre_hook(first, prepend=True, with_kwargs=True)
    linear.register_forward_hook(second, with_kwargs=True)
    handle = nn.modules.module.register_module_forward_hook(every)
    try:
        assert forward_hooks(linear) == ([(first, True), (second, False)], [(every, False), (second, True)])
        assert forward_hooks(other) == ([], [(every, False)]) and not has_hooks_for_all_ends(linear)
    finally:
        handle.remove()
    for register, named in (
        ("register_forward_hook", {"always_call": True}),
        ("register_full_backward_hook", {}),
        ("register_full_backward_pre_hook", {}),
    ):
        other = nn.Linear(2, 2)
        getattr(other, register)(lambda *_: None, **named)
        assert has_hooks_for_all_ends(other)
    weight = linear.weight
    assert (bool(gradient_hooks(weight)), has_accumulated_hooks(weight)) == (False, False)
    weight.register_hook(lambda _: None)
    assert (bool(gradient_hooks(weight)), has_accumulated_hooks(weight)) == (True, False)
    linear.bias.register_post_accumulate_grad_hook(lambda _: None)
    assert (bool(gradient_hooks(linear.bias)), has_accumulated_hooks(linear.bias)) == (False, True)


def test_a_call_is_wrapped_hooks_included_and_unwrapped() -> None:
    linear, seen = nn.Linear(2, 2), []
    linear.register_forward_hook(lambda *_: seen.append("hook"))

    def call(run: Any, *args: Any) -> Any:
        seen.append("before")
        result = run(*args)
        seen.append("after")
        return result

    outer = wrap_call(linear, call)
    inner = wrap_call(linear, call)
    linear(torch.ones(2))
    assert seen == ["before", "before", "hook", "after", "after"]
    unwrap_call(linear, inner)
    unwrap_call(linear, outer)
    seen.clear()
    linear(torch.ones(2))
    assert seen == ["hook"]


def test_hooks_of_a_module_of_its_own() -> None:
    def nothing(*_: Any) -> None: ...

    plain, *hooked = [nn.Linear(2, 2) for _ in range(5)]
    hooked[0].register_forward_hook(nothing)
    hooked[1].register_forward_pre_hook(nothing)
    hooked[2].register_full_backward_hook(nothing)
    hooked[3].register_full_backward_pre_hook(nothing)
    assert [has_hooks(one) for one in (plain, *hooked)] == [False, True, True, True, True]
    assert not has_hooks(nn.Sequential(hooked[0]))


def test_names_without_the_parts_of_wrappers() -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    wrapped = checkpoint_wrapper(nn.Linear(2, 2))
    names = [name for module in (compiled, wrapped) for name, _ in nn.Sequential(module).named_parameters()]
    assert [name for name, _ in compiled.named_children()] == [COMPILED]
    assert all(any(part in name for part in WRAPPERS) for name in names[:2])  # a checkpoint's wrapper hides its own
    assert {plain_name(name) for name in names} == {"0.weight", "0.bias"}
    assert WRAPPERS[1].removesuffix(".") in dict(wrapped.named_children())


# ---------------------------------------------------------------------------------------------------- distributed
def in_one_tensor() -> list[torch.Tensor]:
    with group_of_all() as group:
        own = torch.tensor([1.0, 2.0]) * (group.position + 1)
        gathered, again, row = torch.empty(4), torch.empty(4), torch.empty(1)
        all_gather_single(gathered, own)
        begin_all_gather(group.handle, again, own).wait()
        assert torch.equal(again, gathered)
        reduce_scatter_single(row, own)
        return [gathered, row]


def pieces_on_two_devices() -> tuple[list[list[float]], bool, str]:
    """A matrix of three rows over ranks: in full; whether its rows share memory; where rows on another device are."""
    with group_of_all() as group:
        mesh = init_device_mesh("cpu", (group.size,))
        template = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
        rows = template.to_local().double()
        piece = dtensor_like(template, rows)
        rows += 1
        return (
            piece.full_tensor().tolist(),
            piece.dtype is rows.dtype,
            dtensor_like(template, rows.to("meta")).device.type,
        )


def test_rows_are_a_part_of_a_dtensor_wherever_they_are(ranks: KeptRanks) -> None:
    whole = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert ranks.run(pieces_on_two_devices) == [(whole, True, "meta")] * 2


def test_one_tensor_is_gathered_and_scattered(ranks: KeptRanks) -> None:
    for position, (gathered, row) in enumerate(ranks.run(in_one_tensor, size=2)):
        assert gathered.tolist() == [1, 2, 2, 4]
        assert row.tolist() == [3 * (position + 1)]


class Ended(Exception):
    pass


class Halves(nn.Module):
    """Its forward may end by an exception."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False)
        self.ends = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.second(self.first(x))
        if self.ends:
            self.output = result
            raise Ended
        return result


def sharded() -> dict[str, Any]:
    """Gradients of a model under `fully_shard`, whose forward ended by an exception, reduced by hand."""
    torch.manual_seed(5)
    model = Halves().double()
    with group_of_all() as group:
        mesh = init_device_mesh("cpu", (group.size,))
        for unit in (model.first, model.second, model):
            fully_shard(unit, mesh=mesh)
        initialize_sharding(model)
        model.set_requires_gradient_sync(False)
        model.ends = True
        try:
            model(torch.ones(2, 3, dtype=torch.float64) * (group.position + 1))
        except Ended:
            [output] = end_sharded_forward(model, [model.output])
        output.sum().backward()
        model.set_requires_gradient_sync(True)
        reduce_sharded(model)
        return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


@pytest.mark.skipif(torch.__version__ < "2.13", reason="zero=3 on several ranks is refused there")
def test_a_sharded_model_ends_its_forward_and_reduces_when_asked(ranks: KeptRanks) -> None:
    torch.manual_seed(5)
    model = Halves().double()
    for scale in (1, 2):
        (model(torch.ones(2, 3, dtype=torch.float64) * scale).sum() / 2).backward()
    for found in ranks.run(sharded, size=2):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)


class TakesTwo(nn.Module):
    """A unit that uses one of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def gradients_of_inputs() -> tuple[bool, list[bool]]:
    """Whether a sharded module's attributes tell of it; which of two inputs have a gradient."""
    keep_unused_inputs()
    model = TakesTwo()
    with group_of_all() as group:
        fully_shard(model, mesh=init_device_mesh("cpu", (group.size,)))
        told = hasattr(model, "_is_fsdp_managed_module")
        hide_sharding(model)
        assert told
        given = [torch.ones(2, 3, requires_grad=True) * 2 for _ in range(2)]
        for one in given:
            one.retain_grad()
        model(*given).sum().backward()
        return hasattr(model, "_is_fsdp_managed_module"), [one.grad is not None for one in given]


def test_an_unused_input_of_a_unit_has_no_gradient_and_its_code_does_not_see_that_it_is_one(ranks: KeptRanks) -> None:
    assert ranks.run(gradients_of_inputs, size=2) == [(False, [True, False])] * 2


class EndsInAView(nn.Module):
    """A unit, whose second result is a view of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers(x).view(-1, 2, 3), x.view(-1, 2, 2)


def loss_behind_a_changed_view(unit: nn.Module, *, begins: bool) -> torch.Tensor:
    x = torch.arange(8, dtype=torch.float64, requires_grad=True).view(2, 4) / 8
    first = next_node_number()
    result, given = unit(x)
    assert [len(nodes_of(one, first)) for one in (result, result * 2, given, x, torch.ones(1))] == [2, 1, 1, 0, 0]
    if begins:
        nodes_of(result, first)[1].register_prehook(lambda _: begin_sharded_backward(unit))
    result *= 2
    return (result**2).sum()


def gradients_behind_a_changed_view(*, begins: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    unit = EndsInAView().double()
    with group_of_all() as group, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        for module in (unit, root := nn.Sequential(unit)):
            fully_shard(module, mesh=init_device_mesh("cpu", (group.size,)), reshard_after_forward=True)
        initialize_sharding(root)
        loss_behind_a_changed_view(unit, begins=begins).backward()
        return [cast(Any, parameter.grad).full_tensor() for parameter in unit.parameters()]


def test_the_backward_of_a_unit_begins_where_its_result_is_a_view_that_was_changed(ranks: KeptRanks) -> None:
    torch.manual_seed(0)
    loss_behind_a_changed_view(unit := EndsInAView().double(), begins=False).backward()
    for found in ranks.run(partial(gradients_behind_a_changed_view, begins=True), size=2):
        for gradient, parameter in zip(found, unit.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)
    with pytest.raises(RankFailure):  # torch's own hook is lost, as long as that is so
        ranks.run(partial(gradients_behind_a_changed_view, begins=False), size=2)


def test_pipelining_imports_what_the_first_optimizer_does() -> None:
    program = "import sys, torch.distributed.pipelining; sys.exit('torch._dynamo' not in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_hooks_for_gradients_are_replaced() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.register_hook(lambda g: 2 * g)
    (doubled,) = gradient_hooks(weight)
    replace_gradient_hooks(weight, [doubled, doubled])
    assert gradient_hooks(weight) == [doubled, doubled]
    weight.sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [4, 4]


def test_step_hooks_of_an_optimizer() -> None:
    before, after = (torch.optim.SGD([torch.ones(1)], lr=1.0) for _ in range(2))
    assert not has_step_hooks(before)
    before.register_step_pre_hook(lambda *_: None)
    after.register_step_post_hook(lambda *_: None)
    assert has_step_hooks(before) and has_step_hooks(after)
    plain = torch.optim.SGD([torch.ones(1)])
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    assert has_step_hooks(plain)
    handle.remove()
    assert not has_step_hooks(plain)


def test_in_backward() -> None:
    seen: list[bool] = []
    numbers: list[int] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(in_backward()))
    x.register_hook(lambda _: numbers.append(backward_number()))
    (x * 2).sum().backward()
    (x * 2).sum().backward()
    assert seen == [True, True] and not in_backward()
    assert numbers[0] != numbers[1] and backward_number() == -1 and -1 not in numbers


def test_spectral_norms() -> None:
    torch.manual_seed(1)
    weight, given = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), torch.ones(2, 3)
    norm = weight.parametrizations.weight[0]
    assert isinstance(norm, SpectralNormOfWeight) and {name for name, _ in norm.named_buffers()} == {*SPECTRAL_VECTORS}
    before = [getattr(norm, name) for name in SPECTRAL_VECTORS]
    for one in before:  # on some processors fifteen iterations have found them to the last bit
        one.fill_(len(one) ** -0.5)
    values = [one.clone() for one in before]
    weight(given)
    assert all(getattr(norm, name) is one for name, one in zip(SPECTRAL_VECTORS, before, strict=True))
    assert not any(torch.equal(one, value) for one, value in zip(before, values, strict=True))
    ((hook, _),) = forward_hooks(old := nn.utils.spectral_norm(nn.Linear(3, 4)))[0]
    assert isinstance(getattr(old, hook.name + ORIGINAL), nn.Parameter)
    assert isinstance(hook, SpectralNorm)


def test_a_node_of_the_backward_has_the_number_that_the_forward_was_about_to_give() -> None:
    seen: list[object] = []
    x = torch.ones(2, requires_grad=True)
    number = next_node_number()
    y = torch.log(x)
    assert next_node_number() == number + 1 and autograd_node() is None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: (seen.append(autograd_node()), t)[1]):
        torch.exp(y).sum().backward()
    assert seen[0] == ("ExpBackward0", number + 1)


def test_a_mode_sees_what_switches_the_recording_of_gradients() -> None:
    seen: list[bool] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if sets_gradients(func):
                seen.append(args[0])
            return func(*args, **(kwargs or {}))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            assert not torch.is_grad_enabled()
            return x * 2

    with Watch():
        Function.apply(torch.ones(2, requires_grad=True))
        with torch.no_grad():
            torch.ones(2).add(1)
    assert seen == [False, True]


def test_norms_of_each_tensor_are_in_the_type_that_is_asked_for() -> None:
    given = [torch.randn(70_001), torch.randn(3, 4, dtype=torch.float64), torch.randn(5).bfloat16(), torch.zeros(0)]
    found = norm_of_each(given, 2, dtype=torch.float64)
    assert [one.dtype for one in found] == [torch.float64] * 4
    torch.testing.assert_close(found, [one.double().square().sum().sqrt() for one in given])


def test_each_tensor_is_added_to_and_copied_to_in_place() -> None:
    given = [torch.full((3,), 6.0), torch.full((2,), 12, dtype=torch.int64)]
    same = [*given]
    add_to_each(given, [torch.ones(3), torch.ones(2, dtype=torch.int64)])
    add_to_each(given[1:], [2])
    assert given[0].tolist() == [7.0] * 3 and given[1].tolist() == [15, 15]
    copy_to_each(given, [torch.full((3,), 0.5, dtype=torch.float64), torch.full((2,), 4, dtype=torch.int64)])
    assert all(one is other for one, other in zip(given, same, strict=True))
    assert given[0].tolist() == [0.5] * 3 and given[0].dtype is torch.float32 and given[1].tolist() == [4, 4]


def test_each_tensor_is_divided_and_multiplied_in_place() -> None:
    given = [torch.full((3,), 6.0), torch.full((2, 2), 12.0, dtype=torch.float64).T, torch.zeros(0)]
    same = [*given]
    divide_each(given, 3.0)
    scale_each(given, 0.5)
    assert all(one is other for one, other in zip(given, same, strict=True))
    assert given[0].tolist() == [1.0] * 3 and given[1].tolist() == [[2.0, 2.0]] * 2


def test_a_backward_of_the_engine_is_within_modes_of_functions() -> None:
    seen: list[str] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    total = torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=False).sum()
    with Watch():
        engine_backward((total,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)
    assert "exp" in seen and x.grad is not None
    torch.testing.assert_close(x.grad, x.detach().exp())


def test_the_table_of_process_groups_and_what_asks_for_the_default_one() -> None:
    home: Any = torch.distributed.distributed_c10d
    before = type(PROCESS_GROUPS), home._get_default_group, home.rendezvous
    kind: Any = type("Groups", before[:1], {"default_pg": property(lambda self: "all")})
    try:
        replace_process_groups(kind, lambda torchs: ("group", torchs), lambda torchs, method: (method, torchs))
        assert (torch.distributed.group.WORLD, torch.distributed.is_initialized()) == ("all", True)
        assert home._get_default_group() == ("group", before[1])
        assert home.rendezvous("env://") == ("env://", before[2])
    finally:
        PROCESS_GROUPS.__class__, home._get_default_group, home.rendezvous = before

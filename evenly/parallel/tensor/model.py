"""A model whose parameters are split over the tensor axis, and which runs as it is written.

Each split parameter keeps its object, and with it its ties and its place in the optimizer; its data is this rank's
part. While the job computes (`Axis.computing`) code that looks it up, by attribute or by `parameters()`, finds a split
tensor of the full shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import evenly.parallel.tensor.ops  # noqa: F401  # pyright: ignore  # what its tensors compute with
from evenly.comm.groups import Group
from evenly.parallel.core.parameter_views import View, ViewedParameters, viewed_tensors
from evenly.parallel.tensor.axis import (
    Axis,
    SplitTensor,
    in_order,
    is_part,
    is_split,
    memory_order,
    own_part,
    transform_full,
    whole_of,
)
from evenly.parallel.tensor.layout import Layout
from evenly.parallel.tensor.shown_parameters import show
from evenly.torch_private import gradient_hooks, is_dtensor, replace_gradient_hooks, without_subclasses


class SplitModel:
    """Splits parameters of `model`, in place, over the ranks of `group`; all ranks hold the same values before.

    layouts: of the parameters to be split, by name. sequence, recomputed, overlapped: as of `Axis`. `parameters`
    are those that are split, `share` their share of all elements.
    """

    def __init__(
        self,
        model: nn.Module,
        layouts: Mapping[str, Layout],
        group: Group,
        *,
        sequence: bool = False,
        recomputed: bool = False,
        overlapped: bool = False,
    ) -> None:
        transform_full()
        self.axis, self.layouts = Axis(group, sequence, recomputed, overlapped), dict(layouts)
        named = dict(model.named_parameters())
        self.parameters = {name: named[name] for name in layouts}
        self._full_shapes = {name: tuple(named[name].shape) for name in layouts}
        elements = sum(parameter.numel() for parameter in named.values())
        self.share = sum(named[name].numel() for name in layouts) / elements
        self._viewed: list[tuple[ViewedParameters, list[str]]] = []
        by_parameter = {id(named[name]): layout for name, layout in layouts.items()}
        for module in model.modules():
            own = module.named_parameters(recurse=False, remove_duplicate=False)
            if mine := {name: by_parameter[id(p)] for name, p in own if id(p) in by_parameter}:
                views = viewed_tensors(module, "_parameters")
                views.add_view(self._view(module, mine))
                self._viewed.append((views, [*mine]))
            if any(True for _ in module.buffers(recurse=False)):
                viewed_tensors(module, "_buffers").kept_as = whole_of
        for name, layout in layouts.items():
            if hooks := gradient_hooks(named[name]):
                replace_gradient_hooks(named[name], [partial(self._hooked, name, hook) for hook in hooks])
            part = own_part(named[name], layout, group.position)
            named[name].data = in_order(part, memory_order(named[name]))  # what is computed of it lies in its order
        self._padding = [
            PaddingZeroed(module)
            for module in model.modules()
            if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor and self._splits(module)
        ]
        self._handles = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def full_view(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of what belongs to parameter `name` and is split as it is; a collective of the group.

        `tensor` itself where it is the whole already, as code of the job between steps makes one.
        """
        layout = self.layouts.get(name)
        if layout is None or (type(tensor) is torch.Tensor and tuple(tensor.shape) == self._full_shapes[name]):
            return tensor
        with torch.no_grad(), without_subclasses():
            part = self.axis.split(tensor.detach().to(self.axis.group.device, copy=True), layout)
            return self.axis.gather_full(part)

    def local_part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        layout = self.layouts.get(name)
        return full if layout is None else own_part(full, layout, self.axis.position)

    def show_parameters(self, model: nn.Module) -> None:
        """Has code of the job that holds a parameter of `model`, as its other axes left it, find the whole of it."""
        for name, parameter in model.named_parameters():
            if name in self.layouts and type(parameter) is nn.Parameter:
                show(parameter, self.layouts[name], self.axis)
        for views, names in self._viewed:  # until another takes the place of a part: functions of torch know parts
            views.asked = views.viewers > 1 or not all(is_part(views.local(one)) for one in names)

    def full_shape(self, name: str, shape: Sequence[int]) -> torch.Size:
        """The shape of `full_view` of a tensor of `shape`."""
        layout = self.layouts.get(name)
        return torch.Size(shape if layout is None else layout.full_shape(shape))

    def as_part(self, name: str, parameter: torch.Tensor, value: Any) -> Any:
        """This rank's part of what code of the job has made like parameter `name`; `value` itself if it is another."""
        if is_split(value) and not is_part(value):
            with without_subclasses():
                return value.detach()
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == self.full_shape(name, parameter.shape):
            return self.local_part(name, value)
        return value

    def _hooked(self, name: str, hook: Callable[[torch.Tensor], torch.Tensor | None], own: torch.Tensor) -> Any:
        """Has the job's hook see the full gradient; a collective in the backward, which is the same on all ranks."""
        result = hook(self.full_view(name, own))
        return None if result is None else self.local_part(name, result)

    def gathered(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The full tensors of `tensors`, of which some may be split; of gradients each rank takes its part."""
        return [self.axis.gather_full(one) if is_split(one) else one for one in tensors]

    def _splits(self, module: nn.Module) -> bool:
        split = {id(parameter) for parameter in self.parameters.values()}
        return any(id(parameter) in split for parameter in module.parameters())

    def _view(self, module: nn.Module, layouts: Mapping[str, Layout]) -> View:
        """While the job computes, a split tensor in the place of each parameter of a module that is in `layouts`."""
        axis = self.axis
        sizes = {name: math.prod(one.part(getattr(module, name).shape, axis.position)) for name, one in layouts.items()}

        def view(name: str, local: torch.Tensor | None) -> SplitTensor | None:
            # A DTensor where the data axis has not gathered it, as it does for the module's own forward; another tensor
            # where `functional_call` has put it there, or in a copy of the module.
            # Outside of a loss it is a plain parameter in a block that `fully_shard` has gathered, and no other.
            if name not in layouts or is_part(local):
                return None  # functions of torch know a part
            active = axis.computing or (axis.shown and type(local) is nn.Parameter)
            if not active or is_dtensor(local):
                return None
            if not isinstance(local, nn.Parameter) or local.numel() != sizes[name]:
                return None
            return axis.view_of(local, layouts[name])

        return view

    def _begin(self, *_: Any) -> None:
        self.axis.__enter__()

    def _end(self, *_: Any) -> None:
        self.axis.__exit__()

    def close(self) -> None:
        """Takes the hooks off the model, whose split parameters can no longer be used."""
        self.axis.closed = True
        for handle in self._handles:
            handle.remove()
        for encoder in self._padding:
            encoder.close()


T = torch.Tensor


class PaddingZeroed:
    """Has `encoder` return zeros at padded positions, as it would if it were not split, until it is closed."""

    def __init__(self, encoder: nn.TransformerEncoder) -> None:
        self._encoder, self._hidden = encoder, None
        encoder.use_nested_tensor = False
        self._handles = [
            encoder.register_forward_pre_hook(self._begin, with_kwargs=True),
            encoder.layers[-1].register_forward_hook(self._end),
        ]

    def _begin(self, encoder: Any, args: Any, kwargs: Any) -> None:
        self._hidden = skipped_positions(encoder, *args, **kwargs)

    def _end(self, _: nn.Module, __: Any, output: T) -> T | None:
        hidden, self._hidden = self._hidden, None
        return None if hidden is None else output.masked_fill(hidden.unsqueeze(-1), 0)

    def close(self) -> None:
        """Gives the encoder back as it was."""
        self._encoder.use_nested_tensor = True
        for handle in self._handles:
            handle.remove()


def skipped_positions(
    encoder: nn.TransformerEncoder,
    src: T,
    mask: T | None = None,
    src_key_padding_mask: T | None = None,
    is_causal: bool | None = None,
) -> T | None:
    """The padded positions [B, S] that torch's encoder would skip if it were not split; None where it skips none."""
    first: Any = encoder.layers[0]
    if src_key_padding_mask is None or mask is not None or src.dim() != 3 or first.training:
        return None
    if not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled():
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (src, *first.parameters())):
        return None
    hidden = src_key_padding_mask if src_key_padding_mask.dtype == torch.bool else src_key_padding_mask != 0
    visible_after_hidden = hidden[:, :-1] & ~hidden[:, 1:]
    return None if bool(visible_after_hidden.any()) else hidden

"""The state of a model and its optimizer as named tensors and plain values, and back.

Names are fully qualified parameter names, the same under every plan:

    model.<name>             parameters and persistent buffers, each storage once, under its first name
    optimizer.<name>.<key>   the optimizer's state tensors of that parameter; those within lists and dicts with a "/"
    optimizer.<number>/...   those of an optimizer that belong to no parameter, or that its own `state_dict` returns
    average.<name>           the average of that parameter, where the job keeps one

Nothing here runs a step: the state of an optimizer that has not stepped is empty and stays so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from evenly.checkpoint.manifest import AVERAGE, MODEL, OPTIMIZER, TensorForm, first_of
from evenly.checkpoint.pieces import NAMES
from evenly.checkpoint.plain import NamedTensor, SmallTensor, encode
from evenly.checkpoint.store import Checkpoint
from evenly.errors import CheckpointError, ResumeError, UserError
from evenly.torch_private import plain_name

# Options of a group that say how it is computed, not what: they belong to the run, not to its state.
EXECUTION = ("foreach", "fused", "capturable", "differentiable")
ASKED = "load a checkpoint into this job"
MOST_IN_OPTIONS = 1024  # elements of a tensor


def read_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return live tensors by name, not copies, and `{"optimizer": {"class", "options", "state", "beyond"}}`.

    `options` and `state` are keyed by parameter name, so that those of several ranks can be united; `beyond` is what
    each optimizer keeps besides.
    Raises `UserError` for an optimizer whose state has no such form, and for a model with extra state.
    """
    names = _parameter_names(model, optimizer)
    tensors = {f"{MODEL}{name}": tensor for name, tensor in _model_tensors(model).items()}
    options: dict[str, Any] = {}
    state: dict[str, Any] = {}
    for group, name, parameter in _parameters(optimizer, names):
        options[name] = _options(group, type(optimizer).__name__)
        plain = _named(optimizer.state.get(parameter, {}), f"{OPTIMIZER}{name}.", tensors)
        plain = {key: value for key, value in plain.items() if value != NamedTensor(f"{OPTIMIZER}{name}.{key}")}
        if plain:
            state[name] = plain
    beyond = [_named(_beyond(one), f"{OPTIMIZER}{number}/", tensors) for number, one in enumerate(_each(optimizer))]
    for name, plain in (*state.items(), *((f"group {number}", one) for number, one in enumerate(beyond))):
        encode(plain, f"the state of {type(optimizer).__name__} for {name}")
    kept = {"options": options, "state": state, "beyond": beyond}
    return tensors, {"optimizer": {"class": type(optimizer).__name__, **kept}}


def has_own_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether what `optimizer` saves of itself may be other than its `state` and its groups."""
    base = torch.optim.Optimizer
    return any(
        getattr(getattr(optimizer, name), "__func__", None) is not getattr(base, name)
        for name in ("state_dict", "load_state_dict")
    )


def _each(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizers for which `optimizer` stands."""
    return getattr(optimizer, "optimizers_of_phases", [optimizer])


def _beyond(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what `optimizer` keeps besides the state of single parameters and the options of its groups."""
    if has_own_state_dict(optimizer):
        return {"state_dict": optimizer.state_dict()}
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    other = {key: value for key, value in optimizer.state.items() if id(key) not in stepped and value != {}}
    return {"other": other} if other else {}


def _named(value: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` with the names of its tensors in their place; the tensors are added to `tensors`."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or str(value.dtype).removeprefix("torch.") not in NAMES:
            found, do = f"it is {value.dtype} of layout {value.layout}", "keep dense tensors that safetensors has"
            raise UserError(f"save {prefix} of the optimizer", found, do)
        name = prefix.removesuffix("/")
        while name in tensors:
            name += "_"
        tensors[name] = value
        return NamedTensor(name)
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {key: _named(one, _path_of(prefix, key), tensors) for key, one in items}
    if type(value) in (list, tuple, deque):
        return _like(value, (_named(one, f"{prefix}{place}/", tensors) for place, one in enumerate(value)))
    return value


def _like(value: Any, items: Iterable[Any]) -> Any:
    return deque(items, value.maxlen) if type(value) is deque else type(value)(items)


def _path_of(prefix: str, key: object) -> str:
    """Return the path of an entry; with another "/" for a key that is no plain name."""
    part = str(key).replace(".", "_").replace("/", "_")
    return f"{prefix}{part}/" if part == key else f"{prefix}{part}//"


def _filled(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of `_named`."""
    if isinstance(value, NamedTensor):
        return tensors[value.name]
    if isinstance(value, dict):
        return {key: _filled(one, tensors) for key, one in cast("dict[Any, Any]", value).items()}
    return _like(value, (_filled(one, tensors) for one in value)) if type(value) in (list, tuple, deque) else value


class SplitAdapter(Protocol):
    """Knows which of the tensors that a rank holds are parts of a checkpoint's."""

    def shapes_here(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
        """From shapes in the checkpoint to those of what this rank holds."""
        ...

    def new_target(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]: ...

    def set_value(self, read: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
        """Fills `tensors` from what was read."""
        ...


def restore(
    checkpoint: Checkpoint,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: SplitAdapter | None = None,
    averages: Mapping[str, Tensor] | None = None,
) -> None:
    """Continue from `checkpoint`: its tensors into the model in place, its state into the optimizer.

    averages: by full name, further tensors that are filled in place.
    A collective. A schedule is to be built before and loaded after, since building one sets options.
    Raises `ResumeError`, with nothing changed, if it is of another model or optimizer.
    """
    check_values(model, optimizer, checkpoint.values)
    forms = checkpoint.forms
    if parts is None:
        tensors = targets(model, optimizer, forms) | {**(averages or {})}
        checkpoint.read(tensors)
    else:
        shapes = parts.shapes_here({name: form.shape for name, form in forms.items()})
        forms = {name: replace(form, shape=shapes[name]) for name, form in forms.items()}
        tensors = targets(model, optimizer, forms) | {**(averages or {})}
        read = dict(parts.new_target(tensors))
        checkpoint.read(read)
        parts.set_value(read, tensors)
    install(model, optimizer, tensors, checkpoint.values)


def targets(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, forms: Mapping[str, TensorForm]
) -> dict[str, Tensor]:
    """Tensors to load a checkpoint of those forms into: the model's own, and new ones for the optimizer.

    The optimizer is not touched; `install` gives it its tensors once they are filled. Saved names that do
    not belong to this model or to its optimizer are left out.
    """
    found = {f"{MODEL}{name}": tensor.detach() for name, tensor in _model_tensors(model).items()}
    owners = {name: (group, p) for group, name, p in _parameters(optimizer, _parameter_names(model, optimizer))}
    if owners:  # what belongs to no parameter goes where the first one is
        owners[""] = next(iter(owners.values()))
    for full_name, form in forms.items():
        name, _, key = full_name.removeprefix(OPTIMIZER).rpartition(".")
        if full_name.startswith(OPTIMIZER) and name in owners:
            found[full_name] = _new_state_tensor(form, key, *owners[name])
    return found


def install(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> None:
    """Give the optimizer the filled `targets` as its own, and its saved options and plain state."""
    saved = values["optimizer"]
    for _, name, parameter in _parameters(optimizer, _parameter_names(model, optimizer)):
        own = {key: tensors[f"{OPTIMIZER}{name}.{key}"] for key in _keys(tensors, name)}
        own.update(_filled(saved["state"].get(name, {}), tensors))
        if own:
            optimizer.state[parameter] = own
        else:
            optimizer.state.pop(parameter, None)
    for group, wanted in _wanted_options(model, optimizer, values):
        _set_options(group, wanted)
    for one, beyond in zip(_each(optimizer), saved.get("beyond", ()), strict=False):
        filled = _filled(beyond, tensors)
        one.state.update(filled.get("other", {}))
        if "state_dict" in filled:
            one.load_state_dict(filled["state_dict"])


def check_values(model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> None:
    """Raises `ResumeError` if the values were saved by another optimizer or with other parameters."""
    saved = values.get("optimizer")
    if not isinstance(saved, dict) or not {"class", "options", "state"} <= saved.keys():
        raise CheckpointError(ASKED, "it holds no optimizer", "resume from a checkpoint of a run")
    if saved["class"] != type(optimizer).__name__:
        found = f"it was saved by {saved['class']}, the job's optimizer is {type(optimizer).__name__}"
        raise ResumeError(ASKED, found, "use the optimizer that it was saved by")
    list(_wanted_options(model, optimizer, values))


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any] | None]:
    """The options of each group; None for a group that has no parameters here."""
    kind = type(optimizer).__name__
    return [_options(group, kind) if group["params"] else None for group in optimizer.param_groups]


def set_empty_groups(optimizer: torch.optim.Optimizer, options: Sequence[Mapping[str, Any] | None]) -> None:
    """Gives the groups that have no parameters here these `options`, by group; None leaves one as it is."""
    for group, wanted in zip(optimizer.param_groups, options, strict=True):
        if not group["params"] and wanted is not None:
            _set_options(group, wanted)


def parameter_of(name: str) -> str:
    for kind in (MODEL, AVERAGE):
        if name.startswith(kind):
            return name.removeprefix(kind)
    return name.removeprefix(OPTIMIZER).rpartition(".")[0]


def _model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    seen: set[object] = set()
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise UserError(f"save {name} of the model", "it is extra state of a module", "keep it in a buffer")
        if _identity(value) not in seen:
            seen.add(_identity(value))
            found[plain_name(name)] = value
    return found


def _parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """id of a parameter -> its first name; of what the optimizer steps in its place, that which it stands for."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), plain_name(name))
    stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return names | {id(p): plain_name(p.stands_for) for p in stepped if hasattr(p, "stands_for")}


def _identity(tensor: Tensor) -> object:
    """Equal for two tensors that are the same numbers in the same memory."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.numel() == 0 or local.data_ptr() == 0:
        return id(tensor)
    return local.device, local.data_ptr(), local.dtype, local.shape, local.stride()


def _parameters(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """(group, name, parameter) for all that the optimizer steps."""
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                found = f"parameter {place} of its group {number} is no parameter of the model"
                raise UserError("keep the state of the optimizer", found, "give it the model's parameters only")
            yield group, names[id(parameter)], parameter


def _options(group: Mapping[str, Any], owner: str) -> dict[str, Any]:
    options = {
        key: _small(value) if isinstance(value, Tensor) and value.numel() <= MOST_IN_OPTIONS else value
        for key, value in group.items()
        if _is_option(key)
    }
    for key, value in options.items():
        encode(value, f"option {key!r} of {owner}")
    return options


def _small(value: Tensor) -> SmallTensor:
    return SmallTensor(str(value.dtype).removeprefix("torch."), value.tolist(), value.device.type == "cpu")


def _is_option(key: str) -> bool:
    return key not in ("params", "param_names", *EXECUTION)


def _keys(tensors: Mapping[str, Tensor], name: str) -> list[str]:
    start = f"{OPTIMIZER}{name}."
    return [n[len(start) :] for n in tensors if n.startswith(start) and not {".", "/"} & {*n[len(start) :]}]


def _new_state_tensor(form: TensorForm, key: str, group: Mapping[str, Any], parameter: Tensor) -> Tensor:
    """Unfilled; sharded as the parameter if it has the parameter's shape.

    A counter named `step` lives on the CPU unless the group computes on the device: the rule that torch's
    own optimizers follow when they load.
    """
    dtype = getattr(torch, form.dtype)
    if form.shape == tuple(parameter.shape) and form.shape != ():
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return torch.empty(form.shape, dtype=dtype, device=parameter.device if on_device else "cpu")


def _wanted_options(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(group, its saved options) for every group that is not empty."""
    saved: Mapping[str, Any] = values["optimizer"]["options"]
    names = _parameter_names(model, optimizer)
    for number, group in enumerate(optimizer.param_groups):
        members = [names[id(parameter)] for parameter in group["params"]]
        unknown = [name for name in members if name not in saved]
        if unknown:
            raise ResumeError(ASKED, f"no optimizer saved {first_of(unknown)}", "use the job that it was saved by")
        differing = [name for name in members if saved[name] != saved[members[0]]]
        if differing:
            found = f"{members[0]} and {differing[0]} of group {number} were saved with different options"
            raise ResumeError(ASKED, found, "use the groups that it was saved with")
        if members:
            yield group, saved[members[0]]


def _set_options(group: dict[str, Any], wanted: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        if isinstance(value, SmallTensor):
            device = "cpu" if value.on_cpu or not group["params"] else group["params"][0].device
            value = torch.tensor(value.items, dtype=getattr(torch, value.dtype), device=device)
        if isinstance(group.get(key), Tensor):  # in place: compiled and captured steps hold this tensor
            group[key].copy_(torch.as_tensor(value))
        elif _is_option(key):
            group[key] = value

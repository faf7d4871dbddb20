"""What an export needs of a model in addition to its tensors: the configuration of a transformers model.

The checkpoint does not know the model, so a run writes this into its folder when it begins. A transformers model is
recognised by attributes of its class; transformers is not imported. No torch at import.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenly.errors import UserError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModelConfig:
    """A transformers model that holds all tensors of a run's model.

    model_class: name of its class.
    prefix:      of its tensors' names in the run's model: "" if it is that model, else the submodule's name and a dot.
    config:      its configuration, as its config.json has it.
    generation:  how it generates, as its generation_config.json has it; None where it does not.
    """

    model_class: str
    prefix: str
    config: dict[str, Any]
    generation: dict[str, Any] | None = None


def write_model_config(model: nn.Module, path: Path, names: Iterable[str] = ()) -> None:
    """Writes what `find_model_config` finds to `path`; if that is nothing, removes the file of an earlier job."""
    found = find_model_config(model, names)
    if found is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")


def find_model_config(model: nn.Module, names: Iterable[str] = ()) -> ModelConfig | None:
    """The transformers model that `model` is, or the submodule that is one and holds all parameters and buffers.

    names: of parameters and buffers that the whole model has, where this rank holds a part of it.
    None if there is no such module, if adapters were put into it, which its class does not know, or if its
    configuration has no form in JSON.
    """
    name, module = next(
        ((name, module) for name, module in model.named_modules() if _is_transformers(module)), ("", None)
    )
    from evenly.torch_private import plain_name  # the model has imported torch

    prefix = plain_name(f"{name}." if name else "")
    if module is None or not all(plain_name(tensor).startswith(prefix) for tensor in (*_tensor_names(model), *names)):
        return None
    if any(type(part).__module__.startswith("peft.") for part in model.modules()):
        return None
    # The class that ZeRO 3 gives to a module has the name of its own class after "FSDP".
    return _described(type(module).__name__.removeprefix("FSDP"), prefix, module)


def read_model_config(path: Path) -> ModelConfig | None:
    """The inverse of `write_model_config`; None if there is no file. Raises `UserError` for a file of another form."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        found = ModelConfig(**fields)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise _malformed(path, str(error)) from None
    sound = isinstance(found.model_class, str) and isinstance(found.prefix, str) and isinstance(found.config, dict)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not sound or not isinstance(found.generation, dict | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _malformed(path, "a field is of another type")
    return found


def _is_transformers(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    known = getattr(type(module), "config_class", None) is not None
    return known and hasattr(config, "to_dict") and hasattr(config, "to_json_string")


def _tensor_names(model: nn.Module) -> Iterator[str]:
    yield from (name for name, _ in model.named_parameters(remove_duplicate=False))
    yield from (name for name, _ in model.named_buffers(remove_duplicate=False))


def _described(model_class: str, prefix: str, module: Any) -> ModelConfig | None:
    try:
        generation = module.generation_config if module.can_generate() else None
        how = None if generation is None else json.loads(generation.to_json_string())
        return ModelConfig(model_class, prefix, json.loads(module.config.to_json_string()), how)
    except (AttributeError, TypeError, ValueError):
        return None


def _malformed(path: Path, found: str) -> UserError:
    return UserError(f"read {path}", found, "remove it to export the weights without a config.json")

"""The adapter of a peft model: which tensors of a run's model it is made of, and its configuration.

As with a transformers model, a run writes this into its folder when it begins, since a checkpoint does not know the
model; peft itself says what it would save. A model of peft is recognised by its class. No torch or peft at import.
"""

from __future__ import annotations

import json
import tempfile
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from evenly.errors import UserError

if TYPE_CHECKING:
    from torch import nn

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True)
class Adapter:
    """What `PeftModel.from_pretrained` reads.

    names:    of its tensors in the adapter's file -> in the run's model.
    config:   as its adapter_config.json has it.
    left_out: parameters that the run trains and the adapter does not have.
    """

    names: dict[str, str]
    config: dict[str, Any]
    left_out: list[str]


def write_adapter(found: Adapter | None, path: Path) -> None:
    """Writes what `find_adapter` has found to `path`; if that is nothing, removes the file of an earlier job."""
    if found is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")


def read_adapter(path: Path) -> Adapter:
    """The inverse of `write_adapter`. Raises `UserError` if there is no file, or one of another form."""
    asked = "export an adapter"
    try:
        found = Adapter(**json.loads(path.read_text(encoding="utf-8")))
        texts: list[Any] = [*found.names.values(), *found.left_out]
        sound = all(isinstance(one, str) for one in texts) and isinstance(found.config, dict)  # pyright: ignore[reportUnnecessaryIsInstance]
    except FileNotFoundError:
        raise UserError(
            asked, "the run's model was no PeftModel whose adapter peft can save", "leave --adapter out"
        ) from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(asked, f"{path} is malformed ({error})", "leave --adapter out") from None
    if not sound:
        raise UserError(asked, f"{path} is malformed (a field is of another type)", "leave --adapter out")
    return found


def find_adapter(model: nn.Module) -> Adapter | None:
    """The active adapter of the PeftModel that `model`, which is whole, is or holds.

    None if there is no such module, or if peft saves what is no tensor of its state (the prompts of a prompt encoder).
    """
    name, module = next(((name, one) for name, one in model.named_modules() if _is_peft(one)), ("", None))
    if module is None:
        return None
    import torch
    from peft import get_peft_model_state_dict

    from evenly.torch_private import plain_name

    prefix, peft_model = plain_name(f"{name}." if name else ""), cast("Any", module)
    own = {plain_name(one): value for one, value in model.named_parameters(remove_duplicate=False)}
    known = [*own, *(plain_name(one) for one, _ in model.named_buffers(remove_duplicate=False))]
    # Each stands for the tensor of its name, so that what peft returns tells which it would save.
    marks = {one.removeprefix(prefix): torch.empty(0) for one in dict.fromkeys(known) if one.startswith(prefix)}
    active = peft_model.active_adapter
    saved = get_peft_model_state_dict(peft_model, state_dict=marks, adapter_name=active, save_embedding_layers=False)
    by_mark = {id(mark): one for one, mark in marks.items()}
    if not saved or any(id(mark) not in by_mark for mark in saved.values()):
        return None
    found = {there: prefix + by_mark[id(mark)] for there, mark in saved.items()}
    left_out = [one for one, value in own.items() if value.requires_grad and one not in found.values()]
    return Adapter(found, _config(peft_model.peft_config[active], peft_model), left_out)


def _is_peft(module: nn.Module) -> bool:
    return (
        type(module).__module__.startswith("peft.")
        and hasattr(module, "peft_config")
        and hasattr(module, "active_adapter")
    )


def _config(config: Any, peft_model: Any) -> dict[str, Any]:
    saved = copy(config)
    saved.inference_mode = True
    if saved.base_model_name_or_path is None:
        saved.base_model_name_or_path = getattr(getattr(peft_model, "config", None), "name_or_path", None) or None
    with tempfile.TemporaryDirectory() as folder:
        saved.save_pretrained(folder)
        return json.loads((Path(folder) / ADAPTER_CONFIG).read_text(encoding="utf-8"))

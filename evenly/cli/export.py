"""`evenly export`: writes a checkpoint's weights for other programs, and prints how to load them."""

from __future__ import annotations

import json
from pathlib import Path

from evenly.checkpoint.export import Exported, Step, export
from evenly.errors import UserError


def run_export(run: Path, to: Path, step: str, *, average: bool = False, json_only: bool) -> int:
    """Exports a checkpoint of the run in the folder `run`; returns the exit code."""
    done = export(run, to, step=_parse_step(step), average=average)
    if json_only:
        document = {"files": done.files, "tensors": done.tensors, "bytes": done.bytes, "step": done.step}
        averaged = {} if done.averaged is None else {"averaged": done.averaged}
        print(json.dumps({**document, "config": done.model_class is not None, **averaged}))
        return 0
    files = done.files[0] if len(done.files) == 1 else f"{len(done.files)} files"
    print(f"step {done.step}: {done.tensors} tensors of {done.bytes / 1e6:,.1f} MB in {to}: {files}")
    if done.averaged is not None:
        print("the averaged weights" if done.averaged else "the weights themselves; --average writes their average")
    print("to load them:")
    for line in _how_to_load(done, str(to)):
        print(f"    {line}")
    return 0


def _parse_step(text: str) -> Step:
    if text in ("newest", "best"):
        return None if text == "newest" else "best"
    if not text.isdecimal() or len(text) > 12:
        raise UserError(f"--step {text}", "it is no step", "give its number, newest or best")
    return int(text)


def _how_to_load(done: Exported, to: str) -> list[str]:
    """Returns lines of Python."""
    if done.model_class is not None:
        return [f"model = {done.model_class}.from_pretrained({to!r})"]
    if len(done.files) == 1:
        return [f"safetensors.torch.load_model(model, {f'{to}/{done.files[0]}'!r})"]
    # Each file has a part of the model, and none the second names of tied weights.
    return [
        f"for file in glob.glob({f'{to}/*.safetensors'!r}):",
        "    model.load_state_dict(safetensors.torch.load_file(file), strict=False)",
    ]

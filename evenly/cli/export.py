"""`evenly export`: writes a checkpoint's weights for other programs, and prints how to load them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from evenly.checkpoint.export import Exported, Step, export
from evenly.errors import UserError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class ExportOptions:
    """The options of the command, as they are on the command line."""

    step: str
    average: bool
    shard_size: str
    tokenizer: Path | None
    adapter: bool


def run_export(run: Path, to: Path, options: ExportOptions, *, json_only: bool) -> int:
    """Exports a checkpoint of the run in the folder `run`; returns the exit code."""
    done = export(
        run,
        to,
        step=_parse_step(options.step),
        average=options.average,
        shard_bytes=parse_size(options.shard_size),
        tokenizer=options.tokenizer,
        adapter=options.adapter,
    )
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


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `500 MB`, `2GiB` or `4096`. Raises `UserError` for others."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,9})?)\s*([KMG]?I?B)?", text.strip().upper())
    size = round(float(found[1]) * UNITS[found[2] or ""]) if found is not None and (found[2] or "") in UNITS else 0
    if size < 1:
        raise UserError(f"--shard-size {text}", "it is no size", "give one as 5GB, 500MB or 2GiB")
    return size


def _how_to_load(done: Exported, to: str) -> list[str]:
    """Returns lines of Python."""
    if done.adapter:
        return [f"model = peft.PeftModel.from_pretrained(model, {to!r})"]
    if done.model_class is not None:
        return [f"model = {done.model_class}.from_pretrained({to!r})"]
    if len(done.files) == 1:
        return [f"safetensors.torch.load_model(model, {f'{to}/{done.files[0]}'!r})"]
    # Each file has a part of the model, and none the second names of tied weights.
    return [
        f"for file in glob.glob({f'{to}/*.safetensors'!r}):",
        "    model.load_state_dict(safetensors.torch.load_file(file), strict=False)",
    ]

"""Models without their code: known by name, described in a line, or read from a `config.json`. No torch."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from evenly.errors import UserError
from evenly.planner.hf_config import shape_of_config
from evenly.planner.shape import Shape, active_parameters, limits, parameters

__all__ = ["active_parameters", "find_shape", "known_names", "parameters"]

DESCRIBED = "transformer"
EXAMPLE = "transformer:layers=24,hidden=2048,heads=16"
NEEDED = ("layers", "hidden", "heads")
MOST_CONFIG_BYTES = 1 << 20

FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
# Words that releases add to the name of a model whose shape they keep.
ADDED = frozenset(["meta", "instruct", "chat", "base", "hf", "it", "deduped", "v0.1", "v1.0"])


def find_shape(text: str) -> Shape:
    """The shape that `text` names.

    `text` is a known name (llama-3.1-8b; in either case, divided by -, _ or ., with an owner and what a release adds:
    meta-llama/Llama-3.1-8B-Instruct), a description (transformer:layers=24,hidden=2048,heads=16, with all other fields
    of `Shape` as key=value), or the path of a Hugging Face `config.json` or of a folder with one, which comes before a
    name. A name or a path may be followed by fields too: llama-3.1-8b:sequence=4096. Raises `UserError`.
    """
    text = text.strip()
    base, colon, settings = ("", "", "") if _config_path(text) else text.partition(":")
    if base.strip().lower() == DESCRIBED:
        return _described(text, settings)
    shape = _found(base.strip() if colon else text)
    return _changed(text, shape, settings) if colon else shape


def known_names() -> list[str]:
    return [shape.name for shape, _ in _entries()]


def _found(text: str) -> Shape:
    path = _config_path(text)
    if path is not None:
        return _configured(path)
    known = _known()
    shape = next((known[key] for key in _keys(text) if key in known), None)
    if shape is not None:
        return shape
    asked = f"find the model {_quoted(text)}"
    if text.endswith(".json") or _is(Path.is_dir, Path(text)):
        raise UserError(asked, "no config.json is there", f"give its path, a known model, or {EXAMPLE}")
    near = [known[key].name for key in get_close_matches(_key(text)[:100], known, 5, 0.5)]
    found = f"no such model is known; near are {', '.join(near)}" if near else "no such model is known"
    raise UserError(asked, found, f"name a known one, a config.json, or describe it as {EXAMPLE}")


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


# --- names ---------------------------------------------------------------------------------------------


@cache
def _known() -> dict[str, Shape]:
    """What counts of each name -> its shape, which is shown under that name."""
    return {_key(name): replace(shape, name=name) for shape, also in _entries() for name in (shape.name, *also)}


@cache
def _entries() -> tuple[tuple[Shape, tuple[str, ...]], ...]:
    """Known shapes, each with its further names."""
    content = tomllib.loads(Path(__file__).with_name("known.toml").read_text(encoding="utf-8"))
    return tuple(
        (_complete({**family, "name": f"{name}-{size}", **fields}), also)
        for name, family in content.items()
        for size, fields in family.pop("sizes").items()
        for also in [tuple(fields.pop("also", ()))]
    )


def _key(name: str) -> str:
    return re.sub(r"[-_.\s]+", "", re.sub(r"(?<=\d)[-_.\s]+(?=\d)", "/", name.lower())).replace("/", ".")


def _keys(text: str) -> Iterator[str]:
    yield _key(text)
    name = text.lower().rstrip("/").rpartition("/")[2]
    yield _key(name)
    yield _key("-".join(word for word in re.split(r"[-_\s]+", name) if word not in ADDED))


# --- descriptions --------------------------------------------------------------------------------------


def _described(text: str, settings: str) -> Shape:
    given, problems = _read(settings)
    problems += [f"{key} is missing" for key in NEEDED if not re.search(rf"\b{key}\s*=", settings)]
    if not problems and "head_dim" not in given and given["hidden"] % given["heads"]:
        problems.append(f"hidden={given['hidden']} cannot be shared evenly by heads={given['heads']}: add head_dim=64")
    if problems:
        raise _unreadable(text, problems, EXAMPLE)
    shape = _complete({**_defaults(given), **given})
    if problems := [*shape.problems()]:
        raise _unreadable(text, problems, EXAMPLE)
    return shape


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    name = f"transformer-{given['layers']}x{given['hidden']}"
    kind = dict(vocab=0, outputs=1000, causal=False) if given.get("patch") else dict(vocab=50304)
    return dict(name=name, sequence=2048, **kind)


def _changed(text: str, shape: Shape, settings: str) -> Shape:
    given, problems = _read(settings)
    if "vocab" in given and shape.outputs == shape.vocab:
        given = {"outputs": given["vocab"], **given}
    changed = replace(shape, **given)
    if problems := problems or [*changed.problems()]:
        raise _unreadable(text, problems, f"{shape.name}:sequence=4096")
    return changed


def _unreadable(text: str, problems: list[str], example: str) -> UserError:
    return UserError(f"read the model {_quoted(text)}", "; ".join(problems), f"write it as {example}")


def _complete(given: dict[str, Any]) -> Shape:
    """The shape with these fields and, for what is left out, what follows from them."""
    hidden, heads, ffn = given["hidden"], given["heads"], given.get("ffn", 4 * given["hidden"])
    follows = dict(
        kv_heads=heads,
        head_dim=max(1, hidden // heads),
        ffn=ffn,
        outputs=given["vocab"],
        qkv_bias=given.get("bias", True),
        expert_ffn=ffn if given.get("experts", 1) > 1 else 0,
    )
    return Shape(**{**follows, **given})


def _read(settings: str) -> tuple[dict[str, Any], list[str]]:
    """Fields of `key=value,key=value`, and what is wrong with it."""
    given: dict[str, Any] = {}
    problems: list[str] = []
    for setting in filter(None, (part.strip() for part in settings.split(","))):
        key, equals, value = (part.strip() for part in setting.partition("="))
        try:
            if not equals:
                raise ValueError("is not key=value")
            if key in given:
                raise ValueError("is given twice")
            given[key] = _value(key, value)
        except ValueError as problem:
            problems.append(f"{_quoted(setting)} {problem}")
    return given, problems


@cache
def _kinds() -> dict[str, Any]:
    return get_type_hints(Shape)


def _value(key: str, text: str) -> Any:
    """The value of a field of `Shape`. Raises `ValueError`, in words that follow the setting."""
    if key not in _kinds():
        near = get_close_matches(key, _kinds(), 1)
        raise ValueError(f"is no field (near: {near[0]})" if near else f"is no field ({', '.join(_kinds())} are)")
    kind = _kinds()[key]
    if kind is str:
        return text
    if get_origin(kind) is Literal:
        return _one_of(text, {choice: choice for choice in get_args(kind)})
    if kind is bool:
        return _one_of(text, FLAGS)
    if kind is not int and text.lower() == "none":
        return None
    return _size(key, text)


def _one_of(text: str, choices: Mapping[str, Any]) -> Any:
    if text.lower() not in choices:
        raise ValueError(f"must be one of {', '.join(choices)}")
    return choices[text.lower()]


def _size(key: str, text: str) -> int:
    least, most = (-(10**9), 10**9) if key == "extra" else limits(key)
    if not re.fullmatch(r"-?[0-9]{1,12}", text) or not least <= int(text) <= most:
        raise ValueError(f"must be a whole number from {least} to {most}")
    return int(text)


# --- config.json ---------------------------------------------------------------------------------------


def _config_path(text: str) -> Path | None:
    path = Path(text)
    inside = path / "config.json"
    if _is(Path.is_file, path) and path.suffix != ".py":
        return path
    return inside if _is(Path.is_file, inside) else None


def _is(test: Any, path: Path) -> bool:
    try:
        return bool(path.name) and test(path)
    except (OSError, ValueError):  # no path at all: too long, or with a NUL
        return False


def _configured(path: Path) -> Shape:
    asked = f"read the model of {path}"
    try:
        with path.open("rb") as file:
            content = file.read(MOST_CONFIG_BYTES + 1)
    except OSError as problem:
        raise UserError(asked, str(problem), "give the path of a config.json that can be read") from None
    if len(content) > MOST_CONFIG_BYTES:
        raise UserError(asked, f"it is larger than {MOST_CONFIG_BYTES} bytes", "give the path of a config.json")
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as problem:
        raise UserError(asked, f"it is not JSON: {problem}", "give the path of a config.json") from None
    if not isinstance(config, dict):
        raise UserError(asked, "it is JSON, but no table of keys", "give the path of a config.json")
    try:
        return shape_of_config(config)
    except UserError as problem:
        raise UserError(asked, problem.found, problem.do) from None

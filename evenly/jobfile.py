"""Job files: a Python file that defines `job(**settings) -> evenly.Job`, or whose `job` is one."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from evenly.errors import EvenlyError, UserError, describe
from evenly.job import Job

T = TypeVar("T")
Loop = Callable[[Any], object]

# What others call the fields of a `Job`.
ELSEWHERE = {
    "batch_size": "global_batch",
    "epochs": "steps (epochs times the batches of one)",
    "num_epochs": "steps (epochs times the batches of one)",
    "max_steps": "steps",
    "dataset": "data",
    "train_data": "data",
    "train_dataset": "data",
    "eval_dataset": "eval_data",
    "collate_fn": "collate",
    "criterion": "loss",
    "loss_fn": "loss",
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "max_grad_norm": "clip_norm",
    "dtype": "precision",
}


def load_job(path: Path, settings: dict[str, Any]) -> Job:
    """The job that the file at `path` defines, with `settings` passed to its `job` function.

    Raises `UserError` if there is no such file, it cannot be run, defines no `job`, does not know a setting, or
    returns something else.
    """
    check_settings(path, settings)
    function = _find_function(path)
    try:
        job = function(**settings)
    except EvenlyError:
        raise
    except Exception as problem:
        raise UserError(f"job() of {path}", f"it raised {describe(problem)}", _remedy(problem)) from problem
    if not isinstance(job, Job):
        raise UserError(
            f"job() of {path} must return an evenly.Job", f"it returned a {type(job).__name__}", "return the Job"
        )
    return job


def loop_of(path: Path) -> Loop | None:
    """Return the function `loop` that the job file at `path` defines, once its job is loaded; None if there is none."""
    name = _module_name(path)
    found: Any = getattr(sys.modules.get(name), "loop", None)
    return found if callable(found) and getattr(found, "__module__", "") == name else None


def read_with(path: Path, read: Callable[[], T]) -> T:
    """What `read` makes of a text; where it fails, once the job file at `path`, if it is one, has registered its own
    schedules and kinds of devices. Raises what `read` raises.
    """
    try:
        return read()
    except UserError:
        text = path.read_bytes() if path.suffix == ".py" and path.is_file() else b""
        if not re.search(rb"register_(schedule|device)", text) or owns_loop(path):
            raise
        _find_function(path)
        return read()


def _remedy(problem: Exception) -> str:
    names = [field.name for field in fields(Job)]
    unknown = re.search(r"Job\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(problem))
    if unknown is None:
        return "fix the file"
    known = ELSEWHERE.get(unknown[1]) or next(iter(get_close_matches(unknown[1], names, n=1)), None)
    return f"did you mean {known}?" if known else f"a Job has {', '.join(names)}"


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """`["layers=4", "name=wide"]` as keyword arguments: Python literals where they are, else text."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key.isidentifier():
            raise UserError(f"--set {pair}", "not of the form key=value", "for example --set layers=4")
        try:
            settings[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[key] = value
    return settings


def owns_loop(path: Path) -> bool:
    """Whether the file calls `evenly.start`, that is, runs its own loop as a script."""
    tree = _parse(path)
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(ast.unparse(function) in ("evenly.start", "start") for function in called)


def libraries_of(path: Path) -> list[str]:
    """What the file imports at its top from installed libraries other than torch, as `module` or `module:name`."""
    names: list[str] = []
    for node in _parse(path).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [f"{node.module}:{alias.name}" for alias in node.names]
    return [name for name in names if _is_installed(name.replace(":", ".").partition(".")[0])]


def _is_installed(package: str) -> bool:
    """Whether it is a library: not part of Python, not one of the job's neighbours; but for torch, imported anyway."""
    if package in ("torch", "evenly"):
        return False
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return spec is not None and {"site-packages", "dist-packages"} & {*Path(spec.origin or "").parts} != set()


def check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Raises `UserError` for a setting that `job` does not take, where the text of the file at `path` tells that.

    Also for a text where the default is a number, and for all but True and False where it is one of these:
    `--set flag=false` would be the text 'false', which counts as true.
    """
    function = _definition(path)
    if function is None or function.decorator_list or function.args.kwarg is not None:
        return
    taken = function.args
    names = [argument.arg for argument in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
    defaults = _defaults(taken)
    for key, value in settings.items():
        if key not in names:
            near = get_close_matches(key, names, n=1)
            raise UserError(
                f"--set {key}=... for {path}",
                f"its job() takes: {ast.unparse(taken) or 'none'}",
                f"did you mean {near[0]}?" if near else "",
            )
        if do := _instead(value, defaults.get(key)):
            raise UserError(f"--set {key}={value} for {path}", f"its job() has {key}={defaults[key]}", do)


def with_defaults(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings`, and what `job` of the file at `path` takes by default besides, where that is a constant."""
    function = _definition(path)
    return settings if function is None else {**_defaults(function.args), **settings}


def _definition(path: Path) -> ast.FunctionDef | None:
    return next((node for node in _parse(path).body if isinstance(node, ast.FunctionDef) and node.name == "job"), None)


def _instead(value: object, default: object) -> str:
    """What to give in place of `value`; '' where it can stand for `default`."""
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "give True or False"
    return "give a number" if isinstance(default, int | float) and isinstance(value, str) else ""


def _defaults(taken: ast.arguments) -> dict[str, Any]:
    """Reads the defaults that are constants."""
    places = [*taken.posonlyargs, *taken.args]
    pairs = [*zip(reversed(places), reversed(taken.defaults), strict=False)]
    pairs += [pair for pair in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if pair[1] is not None]
    return {place.arg: default.value for place, default in pairs if isinstance(default, ast.Constant)}


def _parse(path: Path) -> ast.Module:
    if not path.is_file():
        near = (
            get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1)
            if path.parent.is_dir()
            else []
        )
        what = "a folder" if path.is_dir() else "no such file"
        raise UserError(
            f"job file {path}", what, f"did you mean {path.parent / near[0]}?" if near else "give a Python file"
        )
    try:
        return ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError, MemoryError) as problem:  # the last of brackets within brackets
        raise UserError(f"job file {path}", f"it is not Python: {problem}", "fix the file") from problem


def _made_job(path: Path, job: Job, **settings: Any) -> Job:
    if settings:
        asked, found = f"--set {next(iter(settings))}=... for {path}", "its `job` is a Job, and no function"
        raise UserError(asked, found, "define `def job(...) -> evenly.Job:`")
    return job


def _module_name(path: Path) -> str:
    return f"evenly_job_{path.stem}"  # never the name of a library, however the file is called


def _find_function(path: Path) -> Callable[..., Any]:
    path, name = path.resolve(), _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # so that a job file can import its neighbours
    sys.modules[name] = module
    sys.argv[0] = str(path)  # the rest is what follows -- on the command line
    try:
        spec.loader.exec_module(module)
    except EvenlyError:
        raise
    except Exception as problem:
        raise UserError(f"job file {path}", f"it raised {describe(problem)}", "fix the file") from problem
    function = getattr(module, "job", None)
    if isinstance(function, Job):
        return partial(_made_job, path, function)
    if not callable(function):
        found = "no `job`" if function is None else f"`job` is a {type(function).__name__}"
        raise UserError(f"job file {path} must define job()", found, "define `def job() -> evenly.Job:`")
    return function

"""The pages of the reference, made from the code when the site is built: a page cannot say what the code does not.

    python -m docs.generate_reference FOLDER        the same pages as files, to look at

Needs no torch: what cannot be imported without it is read from its source.
"""

from __future__ import annotations

import ast
import html
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from inspect import cleandoc, getdoc, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo

from evenly.cli.main import app
from evenly.job import EMA, SWA, Job, Phase
from evenly.loss import Loss, Sum
from evenly.observe.run_folder import RunFolder
from evenly.plan import NAMED, Plan, PlanSpec
from evenly.plan.axes import DataAxis, DeviceReplicas, PipelineAxis, TensorAxis
from evenly.plan.plan import in_words
from evenly.plan.spec import READERS, SYNONYMS

PACKAGE = Path(__file__).parents[1] / "evenly"
ENTRY = re.compile(r"^(\w+(?:, \w+)*):\s+(.*)$")  # of a docstring: the names that it explains, and the text

# Where the meaning of a plan's key is written: an attribute of a plan, and its field. A size is explained by its class.
KEYS: dict[str, tuple[str, str]] = {
    "data": ("data", "size"),
    "zero": ("data", "zero_stage"),
    "shard": ("data", "shard"),
    "speeds": ("data", "speeds"),
    "tensor": ("tensor", "size"),
    "tensor_exclude": ("tensor", "exclude"),
    "sequence_parallel": ("tensor", "sequence_parallel"),
    "pipeline": ("pipeline", "size"),
    "schedule": ("pipeline", "schedule"),
    "stages_per_rank": ("pipeline", "stages_per_rank"),
    "split_points": ("pipeline", "split_points"),
    "replicas": ("replicas", "count"),
    "output_device": ("replicas", "output_device"),
    **{key: ("", key) for key in ("microbatch", "recompute", "compile", "offload", "precision", "exact")},
}
AXES: dict[str, type[Any]] = {
    "data": DataAxis,
    "tensor": TensorAxis,
    "pipeline": PipelineAxis,
    "replicas": DeviceReplicas,
    "": Plan,
}
SIZES = ("size", "count")
PATTERNS = "patterns of names, with | between them"  # of keys that take any text

CHECKPOINTS = "The state after some steps, in `step-N/`: see [checkpoints](../checkpoints.md)."

# Rows of metrics.jsonl that are no steps; `tests/docs` holds these names against what a run writes.
OTHER_ROWS: dict[str, dict[str, str]] = {
    "An evaluation": {
        "step": "the step that it came after",
        "eval_set": "the name of the evaluation set, where the job has several",
        "eval_loss": "the loss over the whole set",
        "eval_weight": "what the loss was divided by: samples, or tokens that count",
        "eval_metrics": "metrics of the loss and figures of `evaluate`, by name, where there are any",
        "eval_averaged": "true where the evaluation is of the averaged weights (`Job.average`)",
    },
    "A slow rank": {
        "step": "the step in which it was noticed",
        "slow_rank": "the rank",
        "ratio": "its time over that of the others",
        "processor": "what it computes on",
    },
}

# What a user may set, and what it does.
VARIABLES: dict[str, str] = {
    "EVENLY_SECRET": "the secret of a run on several nodes, the same on all of them; `--secret-file` takes its place",
    "EVENLY_CHECK": "1 compares what all ranks ask for before each collective, as `evenly run --check` does",
    "OMP_NUM_THREADS": "threads of each rank on a CPU; 1 where nothing is set",
    "MASTER_ADDR": "the host of rank 0, where a launcher does not give it (Open MPI and MPICH over several hosts)",
    "MASTER_PORT": "the port there; one that follows from the launcher's job where nothing is set",
    "GLOO_SOCKET_IFNAME": "the network interface that gloo uses; found from the route where nothing is set",
    "NCCL_SOCKET_IFNAME": "the network interface that NCCL uses; likewise",
    "CXX": "the C++ compiler for `compile=blocks` on a CPU; `g++` where nothing is set",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "how many kernels oneDNN keeps; chosen by evenly where nothing is set",
    "DNNL_PRIMITIVE_CACHE_CAPACITY": "the older name of the same",
    "TORCH_CPP_LOG_LEVEL": "what torch's C++ code logs; ERROR where nothing is set",
    "NO_COLOR": "1 switches colours off",
    "WANDB_MODE": "with `--log wandb`: online, offline or disabled; wandb's other variables hold too",
    "MLFLOW_TRACKING_URI": "with `--log mlflow`: the server or database; one in the run's folder where nothing is set",
}
# What launchers set and evenly reads, and what evenly sets for its own ranks: by prefix or name.
OF_LAUNCHERS: dict[str, tuple[str, ...]] = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "TORCHELASTIC_"),
    "srun": ("SLURM_",),
    "Open MPI": ("OMPI_", "PMIX_NAMESPACE"),
    "MPICH and others with PMI": ("PMI_", "MPI_"),
    "evenly itself, for its ranks": (
        "EVENLY_OPTIONS",
        "EVENLY_CONTROL",
        "EVENLY_PRELOAD",
        "EVENLY_NOTEBOOK",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ),
}


def pages() -> dict[str, str]:
    """File name in the folder `reference` -> its text in Markdown."""
    return {
        "commands.md": _commands_page(),
        "plan.md": _plan_page(),
        "job.md": _job_page(),
        "files.md": _files_page(),
        "environment.md": _environment_page(),
    }


# ------------------------------------------------------------------------------------------------------ commands
@dataclass(frozen=True)
class Parameter:
    """An argument of a command, or an option.

    name:  `--plan`; of an argument what stands for it, `JOB.py`.
    value: what stands for the value of an option; "" for a switch.
    """

    name: str
    value: str
    help: str
    default: Any


def commands(group: typer.Typer = app, prefix: str = "evenly") -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every command by its full name, `evenly bench comm`, say, and its function."""
    for command in group.registered_commands:
        assert command.callback is not None
        yield f"{prefix} {command.name}", command.callback
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from commands(inner.typer_instance, f"{prefix} {inner.name}")


def parameters(command: Callable[..., Any]) -> Iterator[Parameter]:
    """The arguments and options of a command, in the order of its signature."""
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in signature(command).parameters.items():
        if get_origin(hints[name]) is not Annotated:
            continue  # typer's context
        kind, info = get_args(hints[name])
        if isinstance(info, ArgumentInfo):
            yield Parameter(info.metavar or name.upper(), "", info.help or "", None)
        else:
            # Typer has the first name that an option is given in its place for a default.
            given = [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)]
            option = next(iter(given), f"--{name.replace('_', '-')}")
            yield Parameter(option, info.metavar or _placeholder(kind), info.help or "", parameter.default)


def _placeholder(kind: Any) -> str:
    """What stands for a value of this type; nothing for a switch."""
    kinds = {bool: "", int: "N", float: "NUMBER", Path: "PATH"}
    return next((kinds[one] for one in (kind, *get_args(kind)) if one in kinds), "TEXT")


def _commands_page() -> str:
    text = "# Commands\n\n`evenly COMMAND --help` prints the same. Options may stand in any order.\n"
    for name, command in commands():
        found = [*parameters(command)]
        arguments = [one.name for one in found if not one.name.startswith("-")]
        usage = " ".join([name, *arguments, "[OPTIONS]"])
        rows = [(_code(f"{one.name} {one.value}".strip()), _with_default(one)) for one in found]
        text += f"\n## {name}\n\n{getdoc(command)}\n\n```\n{usage}\n```\n\n{_table(('', 'meaning'), rows)}\n"
    return text


def _with_default(one: Parameter) -> str:
    says_nothing = one.default in (None, False, "", 0, []) or one.default is ...
    if says_nothing or "(default" in one.help:
        return one.help
    return f"{one.help} Default: `{one.default}`."


# ---------------------------------------------------------------------------------------------------------- plans
def values_of(key: str) -> str:
    """What may be given for a plan's key, as its refusal says it."""
    try:
        READERS[key]("?")
    except ValueError as refusal:
        found = str(refusal).removeprefix("must be ")
        return f"{found}, or auto" if _reads(key, "auto") else found
    return PATTERNS


def _reads(key: str, value: str) -> bool:
    try:
        READERS[key](value)
    except ValueError:
        return False
    return True


def meaning_of(key: str) -> str:
    """What a plan's key means: a size by the first sentence of its axis, any other by its line in the docstring."""
    axis, field = KEYS[key]
    if field in SIZES:
        return _first_sentence(getdoc(AXES[axis]) or "")
    return explained(AXES[axis])[field]


def _default_of(key: str) -> str:
    axis, field = KEYS[key]
    derived = {"data": "what other axes leave", "precision": "the job's", "shard": "all ranks of the data axis"}
    if field in SIZES or key in derived:
        return derived.get(key, "1")
    plan = PlanSpec(data=2, tensor=2, pipeline=2).complete("float32")
    value = getattr(getattr(plan, axis) if axis else plan, field)
    return "" if value in (None, ()) else in_words(value)


def _plan_page() -> str:
    rows = [(_code(key), _code(values_of(key)), _default_of(key), _first_upper(meaning_of(key))) for key in READERS]
    named = [(_code(name), _code(_stated(values))) for name, values in NAMED.items()]
    synonyms = ", ".join(f"`{short}` for `{key}`" for short, key in SYNONYMS.items())
    return f"""# Plans

A plan is text: pairs `key=value` and names of common plans, in any order, such as `zero3 recompute=full` or
`data=4 tensor=2`. The product of `data`, `tensor` and `pipeline` is the number of ranks. What a plan leaves open takes
its default, and a data axis that is left open takes all devices that the others leave. Short forms are {synonyms}.
All problems of a plan are reported at once, before any process starts.

## Keys

{_table(("key", "values", "default", "meaning"), rows)}

## Names

{_table(("name", "stands for"), named)}

`auto` has `evenly run` seek the plan that is predicted to be fastest of those that fit and agree with the rest of the
text: `--plan "auto recompute=full"`. An axis with the size `auto` takes all devices that are given.
"""


def _stated(values: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={in_words(value)}" for key, value in values.items()) or "data=(all devices)"


# ----------------------------------------------------------------------------------------------------------- jobs
def explained(kind: type[Any]) -> dict[str, str]:
    """The fields of a class that its docstring explains, and the text of each."""
    return entries(getdoc(kind) or "")


def entries(docstring: str) -> dict[str, str]:
    """Name -> text of the entries `name: text` and `name, name: text`; their further lines stand further in."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in cleandoc(docstring).splitlines():
        begun = ENTRY.match(line)
        if begun is not None:
            names = begun[1].split(", ")
            found |= dict.fromkeys(names, begun[2])
        elif line.startswith(" ") and names:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            names = []
    return found


def _job_page() -> str:
    text = "# Job\n\nA job file defines `job(**settings) -> evenly.Job`; `--set KEY=VALUE` passes settings.\n"
    for kind in (Job, Loss, Sum, Phase, EMA, SWA):
        meanings = explained(Loss if kind is Sum else kind)
        rows = [
            (_code(one.name), _code(str(one.type)), _default(one), _first_upper(meanings[one.name]))
            for one in fields(kind)
            if one.init
        ]
        first = _first_sentence(getdoc(kind) or "")
        text += f"\n## evenly.{kind.__name__}\n\n{first}\n\n{_table(('field', 'type', 'default', 'meaning'), rows)}\n"
    return text


def _default(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        return _code(repr(field.default_factory()))
    return "required" if field.default is MISSING or callable(field.default) else _code(repr(field.default))


# ------------------------------------------------------------------------------------------------ files of a run
def source_entries(path: Path, name: str) -> dict[str, str]:
    """The fields and properties of a class that needs torch to be imported, each with its text."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (node,) = (one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and one.name == name)
    texts = entries(ast.get_docstring(node) or "")
    names = [one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
    properties = [one for one in node.body if isinstance(one, ast.FunctionDef)]
    return {**{name: texts[name] for name in names}, **{one.name: ast.get_docstring(one) or "" for one in properties}}


def _files_page() -> str:
    step = source_entries(PACKAGE / "train" / "reports.py", "StepReport")
    text = f"""# Files of a run

A run writes into `runs/NAME-N`, or into the folder that `--out` names.

{_table(("file", "what it holds"), [*_files()])}

`report.html` and `timeline.json` are written by `evenly report`.

## metrics.jsonl

One JSON object per line, written by the main rank. Keys without a value are left out. A run that goes on adds lines:
steps that it repeats stand there twice. What a job logs by `run.log(...)` is a line with `step` and its names.

### A step

{_table(("key", "meaning"), [(_code(key), _first_upper(meaning)) for key, meaning in step.items()])}
"""
    for title, keys in OTHER_ROWS.items():
        rows = [(_code(key), _first_upper(meaning)) for key, meaning in keys.items()]
        text += f"\n### {title}\n\n{_table(('key', 'meaning'), rows)}\n"
    return text


def _files() -> Iterator[tuple[str, str]]:
    folder = RunFolder(Path())
    for name, member in vars(RunFolder).items():
        if isinstance(member, property) and isinstance(path := getattr(folder, name), Path):
            yield _code(f"{path}" if path.suffix else f"{path}/"), _first_sentence(getdoc(member.fget) or CHECKPOINTS)
    for member, of in ((RunFolder.logger, "NAME"), (RunFolder.events, "N"), (RunFolder.timeline, "N")):
        yield _code(str(member(folder, of))), _first_sentence(getdoc(member) or "")  # pyright: ignore[reportArgumentType]


# -------------------------------------------------------------------------------------------------- environment
def _environment_page() -> str:
    rows = [(_code(name), _first_upper(meaning)) for name, meaning in VARIABLES.items()]
    launchers = [
        (launcher, ", ".join(_code(f"{name}*" if name.endswith("_") else name) for name in names))
        for launcher, names in OF_LAUNCHERS.items()
    ]
    return f"""# Environment variables

None has to be set for a run on one machine.

## What you may set

{_table(("variable", "meaning"), rows)}

## What launchers set

`evenly run` sees by these which launcher has started it, and which rank it is.

{_table(("set by", "variables"), launchers)}
"""


# ------------------------------------------------------------------------------------------------------------ text
def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("\n", " ") for cell in line) + " |" for line in lines)


def _code(text: str) -> str:
    """As code in a cell of a table, where a | would end the cell and a pair of * would be emphasis."""
    if not text:
        return ""
    found = html.escape(text, quote=False)
    return f"<code>{re.sub(r'[|*_`]', lambda sign: f'&#{ord(sign[0])};', found)}</code>"


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _first_sentence(docstring: str) -> str:
    """Up to the first stop that a space or the end follows."""
    return re.split(r"(?<=\.)(?=\s|$)", docstring.strip(), maxsplit=1)[0].replace("\n", " ")


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

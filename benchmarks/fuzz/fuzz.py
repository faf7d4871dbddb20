"""Feeds damaged texts to everything that reads text, in this process, and counts how each ends.

    python benchmarks/fuzz/fuzz.py --inputs 20000 --seed 0 --out benchmarks/results/fuzz.json

Valid plans, clusters, models, settings, command lines, manifests, run folders and records are changed at random (by
`--seed` and the number of the input: `--only NUMBER` runs one again) and given to the functions and commands that read
them. An input is accepted, refused in words, or it ends in a traceback or takes more than LIMIT_S of processor time:
the last two are faults, printed with the input. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import resource
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from evenly.checkpoint.folder import CheckpointFolder
from evenly.checkpoint.manifest import Manifest, TensorForm, Unsound, from_text, to_text
from evenly.cli import main as command_line
from evenly.cli.plan_request import parse_memory
from evenly.errors import EvenlyError
from evenly.hardware.cluster_text import parse_cluster
from evenly.jobfile import check_settings, parse_settings
from evenly.observe.recorder import CollectiveCall, Recorder, call_text, glance, read
from evenly.plan import asked_plan
from evenly.planner.known import find_shape

LIMIT_S = 10.0  # of processor time: a limit that the machine's load does not move
MOST_BYTES = 12 << 30  # of address space

NASTY = [
    "9" * 5000, "9999999999999999999999999", "1e400", "-1", "0", "-0", "1e-320", "NaN", "nan", "Infinity", "-inf",
    "inf", "\udcff", "\ud800", "\x00", "\x1b[31m", "[/red]", "[red]", "²", "٣", "x" * 5000, "/" + "d" * 5000,
    "../" * 400, "~", "[" * 20000, "{" * 3000, '{"a":' * 5000, "a.b." * 3000, "=", "==", ",", ";", ">", "  ", "\n",
    "\r", "\t", "'", '"', "\\", "%s",
    "{}", "$HOME", "true", "null", "None", "[]", "{}", "30000000", "2147483648", "18446744073709551616",
    "1.5", "0x10", "1_000", "+1", "--", "@", "#", "é" * 300, "💥",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**63, 10**30, 10**4000, 1.5, 1e308, -1e308, float("nan"), float("inf"), "", "x",
    "9" * 5000, "\ud800", "[/red]", [], {}, [[]], {"a": {}}, [1, "a", None], "x" * 5000, -0.0, 5e-324,
]  # fmt: skip

PLANS = [
    "ddp", "zero3", "data=4 tensor=2 pipeline=2", "zero=2 shard=2", "pipeline=4 schedule=interleaved stages_per_rank=2",
    "tensor=2 tensor_exclude=head sequence_parallel=on", "data=2 microbatch=8 recompute=full precision=bfloat16",
    "auto precision=float64", "replicas=2 balanced", "pipeline=2 split_points=3,4", "tensor=2 exact=bitwise",
    "3d zero=1", "data=2 pipeline=2 schedule=zbv offload=parameters",
]  # fmt: skip
CLUSTERS = ["8xH100", "4x8xA100-80", "2x8xH100@400rdma", "64xH100", "1xV100@100", "4xB200", "2xT4", "2xcpu"]
MODELS = [
    "gpt2", "llama-3.1-8b:sequence=4096", "transformer:layers=24,hidden=2048,heads=16,vocab=50304", "bert-base",
    "transformer:layers=2,hidden=64,heads=4,experts=4,expert_ffn=64",
    "transformer:layers=12,hidden=768,heads=12,patch=16",
]  # fmt: skip
CLUSTER_FILE = """nodes = 2
devices = 2
kind = "cpu"
backend = "gloo"
network_gbit_per_s = 400
network = "rdma"
cards = 8
in_network = false

[device]
memory_gib = 79.6

[links.all_reduce.2]
alpha_s = 8.1e-05
beta_s_per_byte = 4.2e-10

[rates]
memory = 1.1e10

[rates.matmul.float32]
1024 = 7.9e10
4096 = 9.9e10
"""
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 1000, "max_position_embeddings": 256, "num_key_value_heads": 2,
    "hidden_act": "silu", "tie_word_embeddings": False, "rope_scaling": None, "sliding_window": None,
}  # fmt: skip
OTHER_CONFIGS = [
    {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 500},
    {"model_type": "t5", "d_model": 64, "num_layers": 2, "num_heads": 4, "d_ff": 128, "d_kv": 16, "vocab_size": 500},
    {"model_type": "vit", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
     "image_size": 32, "patch_size": 8, "num_channels": 3, "id2label": {"0": "a", "1": "b"}},
    {"model_type": "mixtral", **{k: v for k, v in CONFIG.items() if k != "model_type"}, "num_local_experts": 4,
     "num_experts_per_tok": 2},
]  # fmt: skip
JOB = """def job(width: int = 8, rate: float = 0.1, name: str = "x", deep: bool = False, sizes=(1, 2)):
    raise NotImplementedError
"""
SETTINGS = ["width=16", "rate=1e-3", "name=run", "deep=true", "sizes=[1,2,3]", 'name="quoted"', "width=3.5"]
PLAN_FILE: dict[str, Any] = {
    "job": "gpt", "plan": "data=1 pipeline=2", "world": 2, "steps": 20, "global_batch": 32, "microbatch": 8,
    "microbatch_cost": None, "seed": 0, "parameters": 1000,
    "predicted": {
        "step_s": 0.1, "samples_per_s": 320.0, "time_s": {"compute": 0.1, "bubble": 0.0},
        "memory_bytes": [{"parameters": 1.0, "peak": 5.0}, {"parameters": 1.0, "peak": 5.0}],
    },
}  # fmt: skip
METRIC: dict[str, Any] = {
    "step": 1, "loss": 2.5, "weight": 32.0, "grad_norm": 1.0, "lr": 0.1, "samples": 32, "step_s": 0.1,
    "samples_per_s": 320.0, "tokens_per_s": 320.0, "memory_bytes": [1000, 2000],
    "memory": [{"parameters": 100, "optimizer": 200}, {"parameters": 100}],
}  # fmt: skip
EVENT: dict[str, Any] = {"time": 1.0, "event": "started", "rank": 0, "size": 2, "step": 0, "pid": 7}
SPAN: dict[str, Any] = {
    "step": 3, "rank": 0, "position": 0, "kind": "forward", "stage": 0, "microbatch": 1, "begin_s": 0.1, "end_s": 0.2,
}  # fmt: skip


class Hang(BaseException):
    """The input took too long."""


# --- damage ---------------------------------------------------------------------------------------------


def damaged(text: str, chance: random.Random) -> str:
    """`text` with a few changes."""
    for _ in range(chance.choice([0, 1, 1, 1, 2, 3, 6])):
        at = chance.randrange(len(text) + 1)
        end = min(len(text), at + chance.choice([0, 1, 1, 2, 5, 20]))
        match chance.randrange(5):
            case 0:
                text = text[:at] + text[end:]
            case 1:
                text = text[:at] + chance.choice(NASTY) + text[end:]
            case 2:
                text = _number_replaced(text, chance)
            case 3:
                text = text[:at] + text[at:end] * chance.choice([2, 3, 50]) + text[end:]
            case _:
                words = text.split(" ")
                chance.shuffle(words)
                text = " ".join(words)
    return text


def _number_replaced(text: str, chance: random.Random) -> str:
    places = [n for n, letter in enumerate(text) if letter.isdigit()]
    if not places:
        return text
    first = last = chance.choice(places)
    while last < len(text) and text[last].isdigit():
        last += 1
    return text[:first] + chance.choice(NASTY[:12] + NASTY[-16:-6]) + text[last:]


def damaged_value(value: Any, chance: random.Random, *, share: float = 0.1) -> Any:
    """A JSON document with some of its values, keys or tables changed."""
    if chance.random() < share:
        return chance.choice(VALUES)
    if isinstance(value, dict):
        kept = {k: damaged_value(v, chance, share=share) for k, v in value.items() if chance.random() > share / 3}
        if chance.random() < share / 2:
            kept[chance.choice(NASTY)[:2000]] = chance.choice(VALUES)
        return kept
    if isinstance(value, list):
        return [damaged_value(one, chance, share=share) for one in value] * chance.choice([1, 1, 1, 1, 0, 2])
    return value


def document(value: Any, chance: random.Random) -> str:
    """`value` as JSON, damaged as a document or as a text."""
    sys.set_int_max_str_digits(0)  # numbers of 5,000 digits are inputs
    try:
        if chance.random() < 0.7:
            return json.dumps(damaged_value(value, chance))
        return damaged(json.dumps(value), chance)
    finally:
        sys.set_int_max_str_digits(sys.int_info.default_max_str_digits)


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(errors="surrogatepass"))
    return path


# --- inputs ---------------------------------------------------------------------------------------------
# Each makes an input from `chance` in `folder`, and returns it as text with what reads it.

Input = tuple[str, Callable[[], object]]


def plan_text(chance: random.Random, folder: Path) -> Input:
    text = damaged(chance.choice(PLANS), chance)

    def act() -> None:
        spec, _ = asked_plan(text)
        if spec is not None:
            _ = str(spec)
            spec.fit(8)

    return text, act


def cluster_text(chance: random.Random, folder: Path) -> Input:
    text = damaged(chance.choice(CLUSTERS), chance)
    return text, lambda: str(parse_cluster(text))


def model_text(chance: random.Random, folder: Path) -> Input:
    text = damaged(chance.choice(MODELS), chance)
    return text, lambda: find_shape(text)


def memory_text(chance: random.Random, folder: Path) -> Input:
    text = damaged(chance.choice(["80GiB", "24gb", "512 MiB", "1e9"]), chance)
    return text, lambda: parse_memory(text)


def config_file(chance: random.Random, folder: Path) -> Input:
    text = document(chance.choice([CONFIG, CONFIG, *OTHER_CONFIGS]), chance)
    path = put(folder / "config.json", text)
    return text, lambda: find_shape(str(path))


def settings_text(chance: random.Random, folder: Path) -> Input:
    pairs = [damaged(pair, chance) for pair in chance.sample(SETTINGS, 2)]
    path = put(folder / "job.py", JOB if chance.random() < 0.7 else damaged(JOB, chance))
    return repr(pairs), lambda: check_settings(path, parse_settings(pairs))


def manifest_text(chance: random.Random, folder: Path) -> Input:
    text = document(json.loads(_manifest()), chance) if chance.random() < 0.8 else damaged(_manifest(), chance)

    def act() -> None:
        from_text(text)

    return text, act


def _manifest() -> str:
    return to_text(Manifest(3, None, {}, {"weight": TensorForm("float32", (3, 5))}, {"step": 3, "seed": 0}))


def cluster_file(chance: random.Random, folder: Path) -> Input:
    text = damaged(CLUSTER_FILE, chance)
    path = put(folder / "cluster.toml", text)
    arguments = ["plan", chance.choice(MODELS[2:]), "--cluster", str(path), "--max-devices", "2", "--top", "2"]
    return text, lambda: command(arguments)


def plan_command(chance: random.Random, folder: Path) -> Input:
    options = {
        "--cluster": chance.choice(CLUSTERS), "--only": chance.choice(PLANS), "--global-batch": "64",
        "--sequence": "128", "--memory": "40GiB", "--max-devices": "8", "--step-time": "2.5", "--top": "3",
    }  # fmt: skip
    chosen = ["--cluster", *chance.sample(sorted({*options} - {"--cluster"}), 2)]
    words = [chance.choice(MODELS[2:]), *(word for name in chosen for word in (name, options[name]))]
    at = chance.randrange(len(words))
    words[at] = damaged(words[at], chance)
    arguments = ["plan", *words, *(["--json"] if chance.random() < 0.3 else [])]
    return repr(arguments), lambda: command(arguments)


def report_command(chance: random.Random, folder: Path) -> Input:
    lines = [json.dumps({**METRIC, "step": step}) for step in range(1, 4)]
    texts = {
        "plan.json": json.dumps(PLAN_FILE), "metrics.jsonl": "\n".join(lines) + "\n",
        "events/rank0.jsonl": json.dumps(EVENT) + "\n", "timeline/rank0.jsonl": json.dumps(SPAN) + "\n",
    }  # fmt: skip
    name = chance.choice(sorted(texts))
    lone = {"plan.json": PLAN_FILE, "metrics.jsonl": METRIC, "events/rank0.jsonl": EVENT, "timeline/rank0.jsonl": SPAN}
    texts[name] = document(lone[name], chance) + "\n" + ("" if name == "plan.json" else texts[name])
    for other, text in texts.items():
        put(folder / "run" / other, text)
    arguments = ["report", str(folder / "run"), *(["--json"] if chance.random() < 0.5 else [])]
    return f"{name}: {texts[name]}", lambda: command(arguments)


def export_command(chance: random.Random, folder: Path) -> Input:
    text = document(json.loads(_manifest()), chance)
    put(folder / "run" / "checkpoints" / "step-00000003" / "manifest.json", text)
    step = damaged(chance.choice(["3", "newest", "best"]), chance)
    arguments = ["export", str(folder / "run"), "--to", str(folder / "to"), "--step", step]

    def act() -> None:
        CheckpointFolder(folder / "run").newest_readable()
        command(arguments)

    return f"{step}: {text}", act


def record_file(chance: random.Random, folder: Path) -> Input:
    path = folder / "0.record"
    recorder = Recorder(path, 0)
    recorder.enter(1, call_text(*CollectiveCall("all_reduce", "data [0-1]", "float32", (3,), "sum", "a", "b (c.py:1)")))
    recorder.close()
    content = bytearray(path.read_bytes()[:2000])
    for _ in range(chance.choice([1, 2, 5, 50])):
        content[chance.randrange(len(content))] = chance.randrange(256)
    path.write_bytes(content if chance.random() < 0.9 else content[: chance.randrange(len(content))])
    return content.hex(), lambda: (read(path), glance(path))


INPUTS: list[tuple[int, Callable[[random.Random, Path], Input]]] = [
    (6, plan_text), (4, cluster_text), (4, model_text), (1, memory_text), (4, config_file), (3, settings_text),
    (4, manifest_text), (3, cluster_file), (5, plan_command), (4, report_command), (2, export_command),
    (1, record_file),
]  # fmt: skip


def command(arguments: list[str]) -> None:
    """`evenly ARGUMENTS` in this process; refusals end in exit code 1 or 2, with words."""
    errors = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["evenly", *arguments]),
        contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")) as output,
        contextlib.redirect_stderr(errors),
    ):
        try:
            command_line.main()
        except SystemExit as ended:
            if ended.code not in (None, 0):
                if ended.code not in (1, 2) or not errors.getvalue().strip():
                    raise AssertionError(f"exit code {ended.code}: {errors.getvalue()[-300:]}") from None
                raise EvenlyError(errors.getvalue()) from None
        finally:
            output.flush()


# --- outcomes -------------------------------------------------------------------------------------------


def outcome(act: Callable[[], object]) -> tuple[str, str]:
    """How an input ends, with the traceback of a fault."""

    def late(number: int, frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        act()
        return "accepted", ""
    except (EvenlyError, Unsound):
        return "refused", ""
    except Hang:
        return "hang", traceback.format_exc(limit=-6)
    except BaseException as problem:
        if is_handled_by_the_command_line(problem):
            return "refused", ""
        return "traceback", traceback.format_exc(limit=-6)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def is_handled_by_the_command_line(problem: BaseException) -> bool:
    """What `main` puts into words for every command."""
    return isinstance(problem, RecursionError) or (isinstance(problem, OSError) and problem.filename is not None)


def inputs(seed: int, numbers: Iterator[int]) -> Iterator[tuple[int, str, str, str, str]]:
    """Number, kind, outcome, input and traceback of each input."""
    makers = [maker for weight, maker in INPUTS for _ in range(weight)]
    for number in numbers:
        chance = random.Random(f"{seed} {number}")
        maker = chance.choice(makers)
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            text, act = maker(chance, Path(folder))
            ended, trace = outcome(act)
        yield number, maker.__name__, ended, text, trace


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    first, count = (options.first, options.inputs) if options.only is None else (options.only, 1)
    counts: dict[str, Counter[str]] = {}
    for number, kind, ended, text, trace in inputs(options.seed, iter(range(first, first + count))):
        counts.setdefault(kind, Counter())[ended] += 1
        if ended in ("hang", "traceback"):
            shown = text if len(text) < 400 else f"{text[:300]} ... {text[-60:]}"
            print(f"{number} {kind} {ended}\n  {shown!r}\n{trace}", flush=True)
    total = sum(counts.values(), Counter[str]())
    faults = total["hang"] + total["traceback"]
    found = {"seed": options.seed, "inputs": count, "faults": faults, "limit_s": LIMIT_S, "all": dict(total)}
    text = json.dumps({**found, "kinds": {kind: dict(counts[kind]) for kind in sorted(counts)}}, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return int(faults > 0)


if __name__ == "__main__":
    raise SystemExit(main())

"""What a rank takes to load pretrained weights of a model that it does not hold: a Llama of 1.1 B parameters, bfloat16.

    python benchmarks/weights/load.py [FOLDER] [PLAN ...]        needs 9 GB of disk in FOLDER, and of memory

Its weights are made here, in shards of 400 MB, and loaded on four ranks under each plan, by `weights=` and by
`from_pretrained` in `model=`. Of every rank: the peak of its resident set while the model is built, loaded and composed
with the plan, above what it held before, as a share of the model's bytes; the same without the files that are mapped,
whose pages all ranks share; and whether the bits of all tensors are those of the files. Then a run is saved and
exported, and transformers computes the logits of what was exported. Kept in benchmarks/results/weights.json.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import evenly
import evenly.train.run as run_module
from evenly.checkpoint.export import export
from evenly.engine.compose import Composed
from evenly.errors import UserError
from evenly.launcher.agent import Launch, start_ranks

RESULTS = Path(__file__).parents[1] / "results" / "weights.json"
PLANS = ("zero3", "tensor=4 data=1", "pipeline=4 data=1")
RANKS = 4
SHARD_BYTES = 400 * 10**6
LARGE: dict[str, Any] = dict(hidden_size=2048, num_hidden_layers=22, intermediate_size=5632, vocab_size=32000)
SMALL: dict[str, Any] = dict(hidden_size=64, num_hidden_layers=4, intermediate_size=64, vocab_size=96)


def config(sizes: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        **sizes, num_attention_heads=32, num_key_value_heads=4, tie_word_embeddings=False, dtype=torch.bfloat16
    )


def build(sizes: dict[str, Any]) -> LlamaForCausalLM:
    return LlamaForCausalLM._from_config(config(sizes), dtype=torch.bfloat16)  # pyright: ignore


def trained_in_part(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Only the last norm is trained: gradients, which some plans make room for at once, are no part of loading."""
    model.requires_grad_(False)
    model.model.norm.requires_grad_(True)
    return model


def loss(model: torch.nn.Module, tokens: torch.Tensor) -> evenly.Loss:
    logits = model(tokens).logits[:, :-1].flatten(0, 1)
    return evenly.Loss(F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum"), tokens[:, 1:].numel())


def make(folder: Path, sizes: dict[str, Any], shard_bytes: int = SHARD_BYTES) -> int:
    """Writes weights in shards with an index, as save_pretrained names them; returns their bytes."""
    folder.mkdir()
    config(sizes).save_pretrained(folder)
    with torch.device("meta"):
        state = build(sizes).state_dict()
    shards: list[list[str]] = [[]]
    for name, tensor in state.items():
        if sum(state[one].nbytes for one in shards[-1]) + tensor.nbytes > shard_bytes and shards[-1]:
            shards.append([])
        shards[-1].append(name)
    draw = torch.Generator().manual_seed(0)
    places: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        made = {name: torch.randn(state[name].shape, generator=draw).mul_(0.02).bfloat16() for name in names}
        save_file(made, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    total = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def job(folder: Path, sizes: dict[str, Any], how: str) -> evenly.Job:
    by_name = how == "weights"
    return evenly.Job(
        model=lambda: trained_in_part(build(sizes) if by_name else LlamaForCausalLM.from_pretrained(folder)),
        weights=folder if by_name else None,
        loss=loss,
        data=torch.zeros(4, 8, dtype=torch.int64),  # pyright: ignore[reportArgumentType]
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=4,
        microbatch=1,
        steps=1,
    )


def memory(field: str) -> int:
    """Bytes of this process: VmRSS, VmHWM, or RssAnon, in which files that are mapped do not count."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(field))
    return int(line.split()[1]) * 1024


class AnonymousPeak:
    """Samples the memory that is this process's own; `peak` is the most of it."""

    def __init__(self) -> None:
        self.peak, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._done.wait(0.02):
            self.peak = max(self.peak, memory("RssAnon"))

    def close(self) -> int:
        """The peak."""
        self._done.set()
        self._thread.join()
        return self.peak


class Loaded(UserError):
    """Ends a start when the model is loaded, on all ranks."""


def load(folder: Path, small: Path, plan: str, how: str, out: Path | None) -> tuple[int, int, int, float, bool]:
    """On a rank: peak above what it held before, with mapped files and without, what it holds afterwards (without),
    seconds, and whether the bits are right.
    """
    transformers.logging.disable_progress_bar()
    with evenly.start(job(small, SMALL, how), plan=plan):
        pass  # everything is imported
    build_and_compose, rows = run_module.build_and_compose, list[tuple[int, int, int, float, bool]]()

    def watched(*given: Any) -> Composed:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
        before, own_before, began_s = memory("VmRSS"), memory("RssAnon"), time.perf_counter()
        own = AnonymousPeak()
        composed = build_and_compose(*given)
        took_s, own_peak = time.perf_counter() - began_s, own.close() - own_before
        peak, held = memory("VmHWM") - before, memory("RssAnon") - own_before
        rows.append((peak, own_peak, held, took_s, same_bits(composed, folder)))
        if out is None:
            raise Loaded("loading", "it is done", "")
        return composed

    run_module.build_and_compose = watched
    with suppress(Loaded), evenly.start(job(folder, LARGE, how), plan=plan, out=out) as run:
        run.save()
    return rows[0]


def same_bits(composed: Composed, folder: Path) -> bool:
    """Whether the parameters that this rank has a part of are, whole, those of the files."""
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    same = True
    for name, parameter in composed.model.named_parameters():
        if not parameter.is_meta:  # of another stage
            whole = composed.full_view(name, parameter.detach())
            with safe_open(folder / places[name], "pt") as file:
                same = same and torch.equal(whole, file.get_tensor(name))
    return same


def same_logits(folder: Path, exported: Path) -> bool:
    """Whether transformers computes the same of both folders."""
    tokens = torch.arange(24).view(2, 12) * 97 % LARGE["vocab_size"]
    found: list[torch.Tensor] = []
    for one in (folder, exported):
        with torch.no_grad():
            found.append(LlamaForCausalLM.from_pretrained(one)(tokens).logits)
    return torch.equal(*found)


def measured(root: Path, total: int, plan: str, how: str, *, saves: bool) -> dict[str, Any]:
    out = root / "run" if saves else None
    results = start_ranks(load, (root / "large", root / "small", plan, how, out), Launch(devices=RANKS))
    rows = [results[rank] for rank in sorted(results)]
    row: dict[str, Any] = {
        "peak_of_model": [round(row[0] / total, 3) for row in rows],
        "own_peak_of_model": [round(row[1] / total, 3) for row in rows],
        "own_held_of_model": [round(row[2] / total, 3) for row in rows],
        "load_s": round(rows[0][3], 1),
        "same_bits": all(row[4] for row in rows),
    }
    print(f"{plan}, {how}:", row)
    return row


def main() -> None:
    root = Path(tempfile.mkdtemp(prefix="weights-", dir=sys.argv[1] if sys.argv[1:] else None))
    plans = sys.argv[2:] or PLANS
    document: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    try:
        total = make(root / "large", LARGE)
        make(root / "small", SMALL, 10**5)
        for how in ("weights", "from_pretrained"):
            for plan in plans:
                row = measured(root, total, plan, how, saves=False)
                machine = {"python": platform.python_version(), "torch": torch.__version__}
                date = time.strftime("%Y-%m-%d", time.gmtime())
                document[f"{plan} {how}"] = {
                    "date": date, "machine": machine, "ranks": RANKS, "model_bytes": total, **row
                }  # fmt: skip
                RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        measured(root, total, plans[0], "weights", saves=True)
        export(root / "run", root / "exported", shard_bytes=SHARD_BYTES)
        document["exported_logits_same"] = same_logits(root / "large", root / "exported")
        print("logits of the exported weights the same:", document["exported_logits_same"])
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()

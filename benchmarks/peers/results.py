"""The kept figures: results/peers.json under [kind][workload][contender], and how they print.

Every row carries when it was measured and, as `environment`, the key of where (see `environments`).
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from contenders import CONTENDERS, HERE, PYTHON

RESULTS = HERE.parent / "results" / "peers.json"
FOLDERS = re.compile(r"(?:/[\w.+@-]+)+/")


@cache
def environment() -> dict:
    """See environment.py. Also builds the corpus, before any contender is timed."""
    output = subprocess.run([*PYTHON, str(HERE / "environment.py")], capture_output=True, check=True, text=True)
    return json.loads(output.stdout)


def without_folders(value: object) -> object:
    """The same data with absolute paths cut down to the names of files."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(item) for item in value]
    return FOLDERS.sub("", value) if isinstance(value, str) else value


def save(kind: str, workload: str, rows: dict[str, dict], path: Path = RESULTS) -> None:
    """Add rows to the figures kept at `path`, replacing those of the same contenders."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    here = environment()
    key = hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()[:8]
    kept.setdefault("environments", {})[key] = here
    stamp = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "environment": key}
    target = kept.setdefault(kind, {}).setdefault(workload, {})
    target.update({name: {**without_folders(row), **stamp} for name, row in rows.items()})
    _write(path, json.dumps(kept, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


# ---------------------------------------------------------------- tables, in Markdown
def print_tables() -> None:
    kept = json.loads(RESULTS.read_text())
    _table("throughput, ratio to raw DDP: median of paired steps [its 95 % interval]", kept.get("speed"), _ratio)
    _table("throughput, ratio to hf_rebalance in the same rounds", kept.get("speed"), _against_rebalance)
    _table("peak RSS, MiB, highest rank (over that after the imports)", kept.get("speed"), _memory)
    _table("largest difference of a parameter from one process", kept.get("equal"), _difference)
    _table("samples trained on / there; evaluated", kept.get("equal"), _samples)
    _table("launch to first step, s (ratio to raw DDP)", kept.get("launch"), _launch)


def _table(title: str, loads: dict | None, cell) -> None:
    if not loads:
        return
    names = [name for name in CONTENDERS if any(name in rows for rows in loads.values())]
    print(f"\n{title}\n\n| |{'|'.join(loads)}|\n|---|{'---|' * len(loads)}")
    for name in names:
        rows = [load.get(name) for load in loads.values()]
        print(f"|{name}|{'|'.join(_safe(cell, row) for row in rows)}|")


def _safe(cell, row: dict | None) -> str:
    if row is None:
        return ""
    return "failed" if "error" in row else cell(row)


def _ratio(row: dict) -> str:
    return f"{row['ratio']:.3f} [{row['ratio_low']:.2f}..{row['ratio_high']:.2f}]"


def _against_rebalance(row: dict) -> str:
    ratio = row["against"].get("hf_rebalance")
    return "" if ratio is None else f"{ratio:.3f}"


def _memory(row: dict) -> str:
    peak, imports = max(row["peak_rss_per_rank"]), max(row["rss_after_imports"])
    return f"{peak >> 20} (+{(peak - imports) >> 20})"


def _difference(row: dict) -> str:
    return f"{row['param']:.1e}" + (" (float32)" if row.get("dtype") == "float32" else "")


def _samples(row: dict) -> str:
    return f"{row['samples_seen']}/{row['reference_samples']}; {row['eval_samples']}"


def _launch(row: dict) -> str:
    return f"{row['first_step']:.2f} ({row['ratio']:.2f})" if "ratio" in row else f"{row['first_step']:.2f}"

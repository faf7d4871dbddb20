"""Import time and launch-to-first-step of every contender, from the runs bench.py has kept."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

OUT = Path(__file__).with_name("out")
WORKLOADS = ("W1", "W3", "W4")


def times(result: dict) -> tuple[float, ...]:
    """Import, launch to first step, imports to first step (s); RSS after the imports (MiB)."""
    rss = min(result["rss_after_imports"]) / 2**20
    return result["import_seconds"], result["time_to_first_step"], result["step_times"][0], rss


def main() -> None:
    rows: dict[str, list[tuple[float, ...]]] = {}
    for file in OUT.glob("speed*/W*.json"):
        workload, contender, *rest = file.name.split(".")
        if len(rest) == 1 and workload in WORKLOADS:
            rows.setdefault(contender, []).append(times(json.loads(file.read_text())))
    for name, kept in sorted(rows.items()):
        imports, first, after, rss = map(statistics.median, zip(*kept, strict=True))
        best = min(row[1] for row in kept)
        print(
            f"{name:18s} runs {len(kept)}  import {imports:5.2f}s"
            f"  launch to first step {first:5.2f}s (best {best:.2f})"
            f"  from imports to first step {after:5.2f}s  RSS after imports {rss:.0f} MiB"
        )


if __name__ == "__main__":
    main()

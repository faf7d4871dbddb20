"""Writes docs/models.md from the rows of a campaign: what is equal, what is refused and why, counts per plan.

python benchmarks/zoo/summary.py benchmarks/results/zoo.jsonl docs/models.md
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import run
import shrink
import subjects

Row = dict[str, Any]
WORDS = {
    "equal": "the numbers of one device",
    "rounding": "nothing is shown: rounding alone moves the job by more than 1e-3",
    "different": "other numbers",
    "refused": "refused before the first update, in a sentence",
    "late": "refused after an update",
    "error": "a raw error, or ranks that died",
    "timeout": "no end within the limit",
}
WHAT = {
    "transformers": "model types, each made small by one rule (`benchmarks/zoo/shrink.py`)",
    "timm": "families, one small model of each (`benchmarks/zoo/timm.toml`)",
    "diffusers": "denoisers and autoencoders (`benchmarks/zoo/diffusers.toml`)",
    "peft": "adapters on small models of transformers, whose weights are frozen (`benchmarks/zoo/subjects_peft.py`)",
}


def main() -> None:
    rows = [*run.read_rows(Path(sys.argv[1])).values()]
    Path(sys.argv[2]).write_text("\n".join(lines(rows)) + "\n", encoding="utf-8")


def lines(rows: list[Row]) -> list[str]:
    """The lines of the page."""
    built = [row for row in rows if row["status"] != "unbuilt"]
    libraries = [library for library in subjects.LIBRARIES if any(_library(row) == library for row in rows)]
    return [
        "# Models that were tried",
        "",
        f"{_numbers(built, libraries)}, each trained for 2 steps of",
        "3 microbatches in float64 under each plan, and held against a plain loop on one device, tensor by tensor:",
        "`benchmarks/zoo`, on CPUs with gloo. Blocks of any size are units under `zero=3`.",
        "This page is written by `benchmarks/zoo/summary.py` from `benchmarks/results/zoo.jsonl`, and says nothing",
        "that was not run.",
        "",
        f"Versions: {_tally_versions(rows)}.",
        "",
        f"Rows by commit: {_commits(rows)}.",
        "",
        " · ".join(f"*{status}*: {words}" for status, words in WORDS.items() if _any(built, status)),
        "",
        *_experts(built),
        *(line for library in libraries for line in _section(library, [r for r in rows if _library(r) == library])),
        *_left_out(rows),
    ]


def _library(row: Row) -> str:
    return subjects.split(row["architecture"])[0]


def _any(rows: list[Row], status: str) -> bool:
    return any(row["status"] == status for row in rows)


def _numbers(rows: list[Row], libraries: list[str]) -> str:
    counts = {library: len({r["architecture"] for r in rows if _library(r) == library}) for library in libraries}
    return f"{sum(counts.values())} models ({', '.join(f'{count} of {name}' for name, count in counts.items())})"


def _tally_versions(rows: list[Row]) -> str:
    found = {f"{name} {version}" for row in rows for name, version in row["versions"].items()}
    return ", ".join(sorted(found))


def _commits(rows: list[Row]) -> str:
    """How many rows were run on each commit; dirty: with changes that were in no commit."""
    counts = Counter(row.get("commit", "not recorded") for row in rows)
    return ", ".join(f"{commit} ({count})" for commit, count in counts.most_common())


def _experts(rows: list[Row]) -> list[str]:
    """The mixtures of experts that are equal under all plans of a campaign."""
    plans = run.PLANS.split(";")
    found: dict[str, set[str]] = {}
    for row in rows:
        if row.get("experts", 0) > 1:
            found.setdefault(row["architecture"], set())
            if row["status"] == "equal":
                found[row["architecture"]].add(row["plan"])
    if not found:
        return []
    whole = sorted(name for name, equal in found.items() if equal >= set(plans))
    return [
        f"Mixtures of experts: {len(found)}, of which {len(whole)} are equal under all of {', '.join(plans)}"
        + (f": {', '.join(whole)}." if whole else "."),
        "",
    ]


def _section(library: str, rows: list[Row]) -> list[str]:
    """What came out for one library."""
    built = [row for row in rows if row["status"] != "unbuilt"]
    count = len({row["architecture"] for row in built})
    result = [f"## {library}", "", f"{count} {WHAT[library]}.", ""]
    return [*result, *(_counts(built) if built else []), *_reasons(built), *_names(built)]


def _counts(rows: list[Row]) -> list[str]:
    counts = Counter((row["plan"], row["status"]) for row in rows)
    plans = [*dict.fromkeys(row["plan"] for row in rows)]
    heads = [status for status in WORDS if any(counts[plan, status] for plan in plans)]
    table = ["| plan | models | " + " | ".join(heads) + " | share equal |", "|---|---|" + "---|" * (len(heads) + 1)]
    for plan in plans:
        total = sum(counts[plan, status] for status in WORDS)
        cells = " | ".join(str(counts[plan, status]) for status in heads)
        table.append(f"| `{plan}` | {total} | {cells} | {100 * counts[plan, 'equal'] / total:.1f} % |")
    return [*table, ""]


def _reasons(rows: Iterable[Row]) -> list[str]:
    """What was not equal, by plan and reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "equal":
            found.setdefault((row["plan"], row["status"], _reason(row)), []).append(_short(row["architecture"]))
    if not found:
        return []
    result = ["What was not equal:", "", "| plan | status | reason | models |", "|---|---|---|---|"]
    for (plan, status, reason), names in sorted(found.items(), key=lambda item: (item[0][0], -len(item[1]))):
        result.append(f"| `{plan}` | {status} | {reason} | {', '.join(names)} |")
    return [*result, ""]


def _short(name: str) -> str:
    return subjects.split(name)[1]


def _reason(row: Row) -> str:
    """A row's reason without what differs between architectures: names in it, places in code."""
    if row["status"] in ("timeout",):
        return "no end within the limit"
    if row["status"] == "different":
        return f"first in {re.sub('first difference: | on rank.*', '', row['reason'])}; at most {_largest(row):.1e}"
    text = " ".join(line.strip() for line in row["reason"].split("\n"))
    text = re.sub(r" to do: .*", "", text)
    text = re.sub(r"\([\w ]*\w+\.py:\d+\)|\(in the call of.*", "", text)
    text = re.sub(r"\[[^\]]*\]:?\d*", "", text)
    text = re.sub(r"\b\w+(\.\w+){2,}\b", "...", text)
    return re.sub(r"\s+", " ", text).replace("|", "/").strip()[:200]


def _largest(row: Row) -> float:
    return max(row["loss_diff"], row["grad_norm_diff"], row["param_diff"])


def _names(rows: Iterable[Row]) -> list[str]:
    """The architectures that are equal under every plan that was run with them, by what they were trained for."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["architecture"], []).append(row)
    by_head: dict[str, list[str]] = {}
    for name, mine in by_name.items():
        if all(row["status"] == "equal" for row in mine):
            by_head.setdefault(mine[0]["head"], []).append(_short(name))
    result = ["Equal under every plan that was run:", ""]
    return [*result, *(f"- {h.lower().replace('_', ' ')}: {', '.join(names)}" for h, names in by_head.items()), ""]


def _left_out(rows: Iterable[Row]) -> list[str]:
    """What is not run or was not built, and why."""
    unbuilt = {row["architecture"]: _reason(row) or "no end" for row in rows if row["status"] == "unbuilt"}
    result = ["## Not run", "", *(f"- {name}: {reason}" for name, reason in shrink.left_out().items())]
    if unbuilt:
        result += ["", "Not built, or no batch was found that the small model runs on:", ""]
        result += [f"- {name}: {reason}" for name, reason in sorted(unbuilt.items())]
    return result


if __name__ == "__main__":
    main()

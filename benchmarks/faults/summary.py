"""The rows of the campaign as a summary: benchmarks/results/faults.json, and docs/faults.md from it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.faults.cases import PLAN_TEXTS, PLANS, SAVE_EVERY, STALLS, STEPS, Case

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
PAGE = ROOT / "docs" / "faults.md"
KILLS = ROOT / "benchmarks" / "results" / "kills.json"

Row = Mapping[str, Any]

WORDS = {
    "none": "no fault",
    "kill": "a rank is killed (SIGKILL)",
    "segfault": "a rank dies of SIGSEGV",
    "abort": "a rank dies of SIGABRT",
    "stop": "a rank is stopped (SIGSTOP)",
    "hang": "a rank waits forever",
    "sys.exit(0)": "a rank calls `sys.exit(0)`",
    "os._exit(0)": "a rank calls `os._exit(0)`",
    "os._exit(3)": "a rank calls `os._exit(3)`",
    "exception": "the job's code raises on one rank",
    "nan": "a value becomes nan on one rank",
    "memory": "an allocation fails on one rank",
    "disk-full": "the run's disk is full",
    "disk-error": "a rank gets EIO while it saves",
    "read-only": "the run's folder becomes read-only",
    "folder-gone": "the run's folder is removed",
    "truncated": "the largest file of the newest checkpoint is truncated",
    "bit-flipped": "one bit of that file is flipped",
    "file-missing": "the largest file of the newest checkpoint is removed",
    "manifest-torn": "the newest manifest is truncated",
    "manifest-missing": "the newest manifest is removed",
    "manifest-altered": "the newest manifest names another step",
    "partial-left": "a half-written folder is left",
    "empty-folder": "an empty folder has the name of a checkpoint",
    "foreign-file": "the newest checkpoint has an extra file",
    "foreign-job": "the newest checkpoint is another job's, and sound",
    "all-damaged": "all checkpoints are truncated",
    "port-taken": "the port of the rendezvous is taken",
    "node-gone": "the launcher of the second node is killed",
    "cut-5s": "the network is cut for 5 s",
    "cut": "the network is cut for good",
    "clock-forward": "the clock jumps an hour forward",
    "clock-back": "the clock jumps an hour back",
}


def write_summary(rows: Mapping[int, Row], every: Sequence[Case]) -> None:
    """Writes both files from the rows that belong to `every`."""
    mine = [rows[case.number] for case in every if case.number in rows and _same(rows[case.number], case)]
    found = summary(mine, asked=len(every))
    RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(found, json.loads(KILLS.read_text())))


def _same(row: Row, case: Case) -> bool:
    return all(row[key] == getattr(case, key) for key in ("fault", "place", "plan", "rank", "step"))


def summary(rows: Sequence[Row], *, asked: int) -> dict[str, Any]:
    """Counts and figures by fault and by plan; the rows that fell short in full."""
    run = [row for row in rows if not row["skipped"]]
    return {
        "asked": asked,
        "run": len(run),
        "skipped": dict(Counter(row["skipped"] for row in rows if row["skipped"])),
        "commits": dict(Counter(row["commit"] for row in run)),
        "all": figures(run),
        "but_stalls": figures([row for row in run if row["fault"] not in STALLS]),
        "faults": {fault: figures(of) for fault, of in _by(run, "fault", WORDS).items()},
        "plans": {plan: figures(of) for plan, of in _by(run, "plan", PLANS).items()},
        "short": [dict(row) for row in run if row["short"]],
    }


def _by(rows: Iterable[Row], key: str, names: Iterable[str]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {name: [] for name in names}
    for row in rows:
        found[row[key]].append(row)
    return {name: of for name, of in found.items() if of}


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Of some rows: how many, what was noticed and named, what was lost and left, and how far numbers are apart."""
    noticed = [row["noticed_s"] for row in rows if row["noticed_s"] is not None]
    lost = [row["lost"] for row in rows if row["lost"] is not None]
    apart = [row["difference"] for row in rows if row["difference"] is not None]
    finite = [one for one in apart if one is not None and math.isfinite(one)]
    return {
        "rows": len(rows),
        "short": sum(bool(row["short"]) for row in rows),
        "noticed_median_s": round(median(noticed), 2) if noticed else None,
        "noticed_most_s": max(noticed, default=None),
        "named": sum(row["named"] is True for row in rows),
        "lost_most": max(lost, default=None),
        "left": sum(bool(row["left"]) for row in rows),
        "compared": len(apart),
        "wrong_numbers": sum(any("numbers differ" in reason for reason in row["short"]) for row in rows),
        "largest_difference": max(finite, default=None),
    }


# --------------------------------------------------------------------------------------------------------- the page
HEAD = """# Runs that are disturbed

Each of {run} runs was disturbed by one fault, on a rank, in a step and at a place that were chosen beforehand. It
then went on, and its results were compared with those of an undisturbed run, tensor by tensor, in float64:
`python -m benchmarks.faults`. This page and `benchmarks/results/faults.json` are written by `--summary`, from what was
run, a row for each run: {run} of {asked} rows{skipped}.

The job has {steps} steps and writes a checkpoint every {save_every}. Its samples have uneven weights, it has dropout
and a buffer, and its sizes do not divide evenly. The plans, on CPUs with gloo: {plans}.
A run goes on by `--restarts 3`, by a second command with `--resume`, or by itself. Where a fault may make ranks stand
still, the run has `--stall-limit 5`. Rows by commit: {commits}.

| | all | without stalls |
|---|---|---|
| rows | {all[rows]} | {but[rows]} |
| fell short | {all[short]} | {but[short]} |
| wrong numbers | {all[wrong_numbers]} of {all[compared]} compared | {but[wrong_numbers]} of {but[compared]} |
| largest difference of a tensor, relative | {all[largest_difference]} | {but[largest_difference]} |
| noticed after, median | {all[noticed_median_s]} s | {but[noticed_median_s]} s |
| noticed after, at most | {all[noticed_most_s]} s | {but[noticed_most_s]} s |
| steps done again, at most | {all[lost_most]} | {but[lost_most]} |
| runs that left a process or a file | {all[left]} | {but[left]} |

*stalls*: the faults after which something stands still (`stop`, `hang`, `node-gone`, `cut`). *fell short*: rows of
which numbers, message, exit code, checkpoints, steps done again or what was left are not as they have to be.
*noticed*: the time from the fault to the first line about it; of a fault before a command, from that command's start.
*named*: rows whose message has the rank and the cause that the campaign expects (`benchmarks/faults/cases.expected`).
*done again*: a checkpoint is written while the next steps run; if a rank dies meanwhile, the run goes back to the
checkpoint before. *left*: processes, files in the temporary folder and in `/dev/shm`, hidden folders among the
checkpoints.
"""


FOUND = """## What it has found

Some rows fell short at first. Each cause below is gone, all but the last have a test, and these rows were run again.

- An update made parameters nan right before a checkpoint was due. The checkpoint kept them, and no run could go on
  from it.
- Storage that hung while a checkpoint was written let the run wait without bound.
- When a rank called `os._exit(0)`, the error named the rank that had lost its connection to it; with more nodes,
  other nodes too.
- On a busy machine a rank that aborted was reported as having exited with code 0. Among eight ranks another one was
  named.
- When one rank alone could not read a sample at the start, the error spoke of different jobs.
- Ranks lost in the first forward were put down to the plan.
- When one rank failed in a checkpoint, another was said to have failed.
- When a rank hung under `zero3`, the rank that waited for it was sometimes named.
- When the network was cut for good, the run did not end. For this reason launchers of several nodes watch each other.
"""


def page(found: Mapping[str, Any], kills: Sequence[Mapping[str, Any]]) -> str:
    """The text of docs/faults.md."""
    plans = ", ".join(f"`{PLAN_TEXTS[plan]}` ({ranks} ranks)" for plan, ranks in PLANS.items())
    commits = ", ".join(f"{commit} ({rows})" for commit, rows in found["commits"].items())
    skipped = "".join(f"; {rows} skipped: {why}" for why, rows in found["skipped"].items())
    head = HEAD.format(
        run=found["run"], asked=found["asked"], skipped=skipped, steps=STEPS, save_every=SAVE_EVERY,
        plans=plans, commits=commits, all=_words(found["all"]), but=_words(found["but_stalls"]),
    )  # fmt: skip
    parts = [
        head,
        "## By fault\n",
        _table(found["faults"], {name: f"{words} (`{name}`)" for name, words in WORDS.items()}),
        "## By plan\n",
        _table(found["plans"], {plan: f"`{PLAN_TEXTS[plan]}`" for plan in PLANS}),
        "## What fell short\n",
        _short(found["short"]),
        FOUND,
        "## One run, killed again and again\n",
        _kills(kills),
    ]
    return "\n".join(parts)


def _words(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures as they are printed."""
    largest = figures["largest_difference"]
    return dict(figures) | {"largest_difference": "-" if largest is None else f"{largest:.1e}"}


def _table(groups: Mapping[str, Mapping[str, Any]], words: Mapping[str, str]) -> str:
    lines = [
        "| | rows | fell short | named | noticed after, median | at most | done again, at most | wrong numbers |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in groups.items():
        noticed = [_seconds(one[key]) for key in ("noticed_median_s", "noticed_most_s")]
        lost = "-" if one["lost_most"] is None else one["lost_most"]
        cells = [words[name], one["rows"], one["short"], one["named"], *noticed, lost]
        lines.append(f"| {' | '.join(map(str, cells))} | {one['wrong_numbers']} of {one['compared']} |")
    return "\n".join(lines) + "\n"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _short(rows: Sequence[Row]) -> str:
    if not rows:
        return "None.\n"
    lines = ["| case | fault | place | plan | in what |", "|---|---|---|---|---|"]
    for row in rows:
        reasons = " ".join("; ".join(row["short"]).split())
        reasons = reasons if len(reasons) < 160 else reasons[:157] + "..."
        lines.append(
            f"| {row['case']} | {row['fault']} | {row['place']} | {row['plan']} | {reasons.replace('|', ' ')} |"
        )
    return "\n".join(lines) + "\n"


def _kills(kills: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "`benchmarks/faults/kills.py`: 2,000 steps, a rank is killed every few steps, and `--restarts` goes on.",
        "",
        "| plan | checkpoint every | snapshot every | kills | steps done again | at most after one kill | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in kills:
        cells = [f"`{one['plan']}`", one["save_every"], one["snapshot"] or "-", one["kills"], one["steps_done_again"]]
        lines.append(
            f"| {' | '.join(map(str, cells))} | {one['most_after_one_kill']} | {one['largest_difference']:.1e} |"
        )
    return "\n".join(lines) + "\n"

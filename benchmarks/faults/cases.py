"""The faults of the campaign, as data: what is done to which rank of which plan, and what has to be said about it.

Pure: `cases(count)` are the same rows for the same seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.faults.damage import HARMLESS
from benchmarks.faults.damage import KINDS as DAMAGES

STEPS, SAVE_EVERY = 12, 3  # of the job

GoesOn = Literal["restarts", "resume", "by itself"]

PLANS = {"ddp": 2, "zero3": 2, "tensor": 2, "pipeline": 2, "3d": 8}
PLAN_TEXTS = {
    "ddp": "ddp",
    "zero3": "zero3",
    "tensor": "tensor=2",
    "pipeline": "pipeline=2",
    "3d": "data=2 tensor=2 pipeline=2",
}
# The ranks that run the last stage, and with it the loss.
OF_THE_LOSS = {"pipeline": (1,), "3d": (2, 3, 6, 7)}
LARGE = 2  # plans of more than two ranks come once in so many turns

IN_A_STEP = ("dataset", "forward", "backward", "loss", "optimizer")
IN_A_SAVE = ("save", "commit")
NODES = ("node-gone", "cut-5s", "cut")
CLOCKS = ("clock-forward", "clock-back")
STALLS = ("stop", "hang", "node-gone", "cut")

PLACES: dict[str, tuple[str, ...]] = {
    "none": ("nowhere",),
    "kill": ("start", *IN_A_STEP, *IN_A_SAVE),
    "segfault": ("forward", "optimizer"),
    "abort": ("backward", "loss"),
    "stop": ("start", *IN_A_STEP, *IN_A_SAVE),
    "hang": ("start", *IN_A_STEP, "save"),
    "sys.exit(0)": ("start", *IN_A_STEP),
    "os._exit(0)": ("start", *IN_A_STEP, "save"),
    "os._exit(3)": ("start", *IN_A_STEP, "save"),
    "exception": ("start", *IN_A_STEP),
    "nan": IN_A_STEP,
    "memory": ("start", *IN_A_STEP, "save"),
    "disk-full": ("before", "forward", "optimizer"),
    "disk-error": ("save", "commit"),
    "read-only": ("before", "forward", "optimizer"),
    "folder-gone": ("forward", "optimizer"),
    **dict.fromkeys(DAMAGES, ("before", "optimizer")),
    "foreign-job": ("before",),
    "all-damaged": ("before",),
    "port-taken": ("before",),
    "node-gone": ("forward", "optimizer"),
    "cut-5s": ("forward",),
    "cut": ("forward", "optimizer"),
    **dict.fromkeys(CLOCKS, ("rank", "machine")),
}


@dataclass(frozen=True)
class Case:
    """One row of the campaign.

    place:   where in the job the fault fires; "before": the campaign does it before a command.
    step:    in which step, from 1; in a save: after which.
    goes_on: how the run comes to its end: started again by its launcher, by a second command, or undisturbed.
    """

    number: int
    fault: str
    place: str
    plan: str
    devices: int
    rank: int
    step: int
    goes_on: GoesOn

    @property
    def planted(self) -> str:
        """The setting of the job that plants the fault; '' where the job takes no part."""
        if self.place in ("before", "nowhere"):
            return ""
        return f"{self.fault} {self.place} rank={self.rank} step={self.step}"

    def __str__(self) -> str:
        where = f"{self.fault} in {self.place}, rank {self.rank}, step {self.step}"
        return f"{self.number:4} {self.plan:8} {where:50} {self.goes_on}"


@dataclass(frozen=True)
class Expected:
    """What a case has to bring.

    code:    exit code of the disturbed command; None: any but 0.
    words:   a pattern that its message has, of rank and cause; '' where nothing is to be said.
    notices: whether the fault is one that has to be noticed at all.
    """

    code: int | None
    words: str
    notices: bool = True


def cases(count: int, seed: int = 0) -> list[Case]:
    """The first `count` rows: every fault in every place under every plan, again and again elsewhere."""
    draw = random.Random(seed)
    found: list[Case] = []
    turns = 0
    while len(found) < count:
        turn = _turn(turns, draw)
        found += [_drawn(len(found) + n, *one, draw) for n, one in enumerate(turn)]
        turns += 1
    return found[:count]


def _turn(number: int, draw: random.Random) -> list[tuple[str, str, str]]:
    """All (fault, place, plan) in some order; of large plans each in one turn of `LARGE`."""
    every = [(fault, place) for fault, places in PLACES.items() for place in places]
    turn = [
        (*one, plan)
        for n, one in enumerate(every)
        for plan, ranks in PLANS.items()
        if ranks == 2 or (n + number) % LARGE == 0
    ]
    draw.shuffle(turn)
    return turn


def _drawn(number: int, fault: str, place: str, plan: str, draw: random.Random) -> Case:
    devices = PLANS[plan]
    of_the_loss = OF_THE_LOSS.get(plan) if place == "loss" else None
    rank = draw.choice(of_the_loss or range(devices))
    if place == "commit":
        rank = 0  # which makes a checkpoint valid
    elif fault in NODES:
        rank = draw.randrange(devices // 2, devices)  # of the second node
    step = draw.randrange(1, STEPS - 1)  # the last batch is read one step ahead, and is too small for all ranks
    if place in IN_A_SAVE:
        step = draw.choice(range(SAVE_EVERY, STEPS, SAVE_EVERY))
    elif fault in DAMAGES:
        step = draw.randrange(SAVE_EVERY + 2, STEPS - 1)
    elif fault in NODES or fault in CLOCKS:
        step = draw.randrange(2, STEPS - 1)
    elif place == "start":
        step = 1
    return Case(number, fault, place, plan, devices, rank, step, _goes_on(fault, place, draw))


def _goes_on(fault: str, place: str, draw: random.Random) -> GoesOn:
    if fault in ("none", "cut-5s", *CLOCKS) or (fault, place) == ("memory", "start"):
        return "by itself"
    # What only a person can take away, and what several launchers would have to agree about.
    if place == "before" or fault in ("disk-full", "read-only", "folder-gone", *NODES):
        return "resume"
    if place == "start" and fault == "exception":
        return "resume"
    drawn: GoesOn = draw.choice(("restarts", "resume"))
    return "by itself" if fault == "memory" else drawn  # under another plan


# --------------------------------------------------------------------------------------------- what has to be said
def expected(case: Case) -> Expected:
    """What the disturbed command of `case` has to end with and to say."""
    rank, place = rf"rank {case.rank}\b", case.place
    here = r"\(faulty_job\.py:\d+"
    match case.fault:
        case "none" | "cut-5s" | "clock-forward" | "clock-back":
            return Expected(0, "", notices=False)
        case "kill" | "segfault" | "abort":
            name = {"kill": "SIGKILL", "segfault": "SIGSEGV", "abort": "SIGABRT"}[case.fault]
            return Expected(1, rf"{rank}.*killed by {name}")
        case "stop":
            return Expected(1, rf"{rank}'s process is stopped \(SIGSTOP")
        case "hang":
            return Expected(1, rf"{rank}.*faulty_job\.py:\d+")
        case "sys.exit(0)":
            return Expected(1, rf"{rank} failed.*sys\.exit\(0\).*{here}")
        case "os._exit(0)":
            return Expected(1, rf"{rank} failed.*ended with exit code 0 before the run had ended")
        case "os._exit(3)":
            return Expected(1, rf"{rank} failed.*ended with exit code 3")
        case "exception" if place == "start":  # a mistake in the job, for all that is known
            return Expected(2, rf"planted by the campaign {here}.*{rank}")
        case "exception":
            return Expected(1, rf"{rank} failed.*planted by the campaign.*{here}")
        case "nan":
            return Expected(1, rf"{rank}\b.*finite")
        case "memory":  # the run goes on by itself, under another plan
            return Expected(0, rf"{rank} failed.*it had no room.*going on under")
        case "disk-full":
            return Expected(None, r"No space left on device")
        case "disk-error":
            return Expected(1, r"Input/output error")
        case "read-only":
            return Expected(None, r"Read-only file system")
        case "folder-gone":
            return Expected(1, r"No such file or directory|removed or replaced")
        case "foreign-job":
            return Expected(2, r"foreign|differ|use the job that it was saved by")
        case "all-damaged":
            return Expected(1, r"there is no other sound checkpoint")
        case "port-taken":
            return Expected(2, r"port \d+ is taken")
        case "node-gone" | "cut":
            return Expected(None, rf"(node 1|ranks?\b.*{case.rank}|lost another rank)")
        case _:
            return _of_damage(case)


def _of_damage(case: Case) -> Expected:
    if case.place != "before":  # the rank that has done it kills itself
        return Expected(1, rf"rank {case.rank}\b.*killed by SIGKILL")
    if case.fault == "partial-left":
        return Expected(0, "", notices=False)
    return Expected(0, r"the checkpoint of step \d+ is not sound \(.+\): going on from step \d+")


def named_rightly(case: Case, text: str) -> bool:
    """Whether the message says what it has to."""
    pattern = expected(case).words
    return bool(re.search(pattern, " ".join(text.split("\n")), re.DOTALL))


def harmless(case: Case) -> bool:
    """Whether the newest checkpoint stays sound."""
    return case.fault not in DAMAGES or case.fault in HARMLESS


# One fault of each kind, but those of the network, which take two more launchers.
FEW = (
    *("kill", "segfault", "abort", "stop", "hang", "sys.exit(0)", "os._exit(0)", "os._exit(3)", "exception", "nan"),
    *("memory", "disk-full", "disk-error", "read-only", "truncated", "manifest-torn", "foreign-job", "all-damaged"),
    *("port-taken", "clock-back"),
)


def few(every: Sequence[Case]) -> list[Case]:
    """A case of each of `FEW`, under one plan after the other; of the largest plan one alone."""
    small = [plan for plan, ranks in PLANS.items() if ranks == 2]
    plans = [*(plan for plan in PLANS if plan not in small), *small * len(FEW)]
    return [
        next(case for case in every if (case.fault, case.plan) == wanted) for wanted in zip(FEW, plans, strict=False)
    ]


def chosen(every: Sequence[Case], words: str) -> list[Case]:
    """Those whose fault, place or plan is among `words`, separated by commas; all for ''."""
    asked = set(filter(None, words.split(",")))
    return [case for case in every if not asked or asked & {case.fault, case.place, case.plan}]

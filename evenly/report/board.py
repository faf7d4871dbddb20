"""The runs of one folder: a list of them and the page of each, read again only where a run has written something."""

from __future__ import annotations

import json
import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from evenly.errors import UserError
from evenly.observe.run_folder import RunFolder
from evenly.report import analysis, compare
from evenly.report.page import Section, document
from evenly.report.run import RunReader, RunSummary
from evenly.report.runpage import inside, page
from evenly.report.spans import read_recorded
from evenly.report.timeline import pipeline_of, sections_of, step_of

TAIL_BYTES = 32 * 1024  # of metrics.jsonl, from which the list has a run's newest steps
PAGES = 8  # of runs that are followed at the same time
MOST_COMPARED = 12
RENDERING = 200  # times as long as a page took to make, none is made again: that is half a percent of a core

Stamp = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Reply:
    """A text to be served, and a tag that is another for another text."""

    text: str
    tag: str

    @classmethod
    def of(cls, text: str) -> Reply:
        return cls(text, sha256(text.encode("utf-8", errors="replace")).hexdigest()[:16])


@dataclass
class _Listed:
    """A run of the list. files: those that change where its row does. row: of the state that it names."""

    reader: RunReader
    files: Sequence[Path]
    stamp: Stamp = ()
    run: RunSummary | None = None
    row: dict[str, Any] | None = None


@dataclass
class _Followed:
    reader: RunReader
    stamp: tuple[Any, ...] = ()
    reply: Reply | None = None


@dataclass
class Board:
    """The runs in the folders within `root`. For one thread at a time."""

    root: Path
    _listed: dict[str, _Listed] = field(default_factory=dict[str, _Listed])
    _followed: OrderedDict[str, _Followed] = field(default_factory=OrderedDict[str, _Followed])
    _not_before_s: float = 0.0

    def folders(self) -> dict[str, Path]:
        """The folders of runs by their names; none that lies elsewhere, to which a link leads."""
        try:
            entries = sorted(os.scandir(self.root), key=lambda entry: entry.name)
        except OSError:
            return {}
        return {
            entry.name: Path(entry.path)
            for entry in entries
            if entry.is_dir(follow_symlinks=False) and (entry.name in self._listed or _is_run(Path(entry.path)))
        }

    def _folder(self, name: str) -> Path:
        listed = self._listed.get(name)
        if listed is not None and _is_run(listed.reader.folder):
            return listed.reader.folder
        return self.folders()[name]

    # --- the list
    def listing(self) -> Reply:
        """All runs as a JSON document, the last one that was written to first."""
        return Reply.of(json.dumps({"runs": [*self._rows(time.time())]}))

    def _rows(self, now_s: float) -> Iterator[dict[str, Any]]:
        found: list[tuple[float, dict[str, Any]]] = []
        folders = self.folders()
        self._listed = {name: self._listed.get(name) or _new(folder) for name, folder in folders.items()}
        for name, one in self._listed.items():
            if (stamp := _stamp(one.files)) != one.stamp:
                one.stamp, one.run, one.row = stamp, _read(one.reader), None
            if one.run is not None:
                if one.row is None or one.row["state"] != analysis.state_of(one.run, now_s):
                    one.row = row_of(name, one.run, now_s)
                found.append((one.run.changed_s, one.row))
        return (row for _, row in sorted(found, key=lambda pair: (-pair[0], pair[1]["name"])))

    # --- a page
    def page(self, name: str, *, script: str = "") -> Reply:
        """The page of run `name`; with a `script` the whole, else what is to take the place of what it shows.

        Raises `KeyError` for a name of no run, and `UserError` as `read_run`.
        """
        folder = self._folder(name)
        if script:
            run = self._follow(name, folder).reader.read()
            return Reply.of(page(run, folder, *_timeline(run, folder), now_s=time.time(), script=script))
        return self._contents(name, folder)

    def _contents(self, name: str, folder: Path) -> Reply:
        one, now_s = self._follow(name, folder), time.time()
        if one.reply is not None and time.monotonic() < self._not_before_s:
            return one.reply
        stamp = (_stamp(_files_of_page(RunFolder(folder))), self._state(name, now_s))
        if one.reply is not None and stamp == one.stamp:
            return one.reply
        began_s = time.monotonic()
        run = one.reader.read()
        one.stamp, one.reply = stamp, Reply.of(inside(run, folder, *_timeline(run, folder), now_s=now_s))
        ended_s = time.monotonic()
        self._not_before_s = ended_s + RENDERING * (ended_s - began_s)
        return one.reply

    def _state(self, name: str, now_s: float) -> str:
        listed = self._listed.get(name)
        return analysis.state_of(listed.run, now_s) if listed is not None and listed.run is not None else ""

    def _follow(self, name: str, folder: Path) -> _Followed:
        """The reader of run `name`; of the runs that nobody has looked at for longest none is kept."""
        one = self._followed.pop(name, None) or _Followed(RunReader(folder))
        self._followed[name] = one
        while len(self._followed) > PAGES:
            self._followed.popitem(last=False)
        return one

    # --- several
    def comparison(self, names: Sequence[str]) -> Reply:
        """The page that compares runs. Raises `KeyError` and `UserError` as `page`."""
        folders = self.folders()
        chosen = [folders[name] for name in dict.fromkeys(names)][:MOST_COMPARED]
        if not chosen:
            raise KeyError("no run")
        runs = compare.named(chosen, [self._follow(folder.name, folder).reader.read() for folder in chosen])
        return Reply.of(compare.page(runs, now_s=time.time()))


def _is_run(folder: Path) -> bool:
    return not folder.is_symlink() and RunFolder(folder).plan.is_file()


def _new(folder: Path) -> _Listed:
    return _Listed(RunReader(folder, tail_bytes=TAIL_BYTES), _files_of_row(RunFolder(folder)))


def _read(reader: RunReader) -> RunSummary | None:
    try:
        return reader.read()
    except UserError:  # not yet, or not any more
        return None


def _files_of_row(folder: RunFolder) -> list[Path]:
    """What the list has a run's row from; one of them is written at each step."""
    return [folder.plan, folder.metrics, folder.events(0)]


def _files_of_page(folder: RunFolder) -> list[Path]:
    return [*_files_of_row(folder), folder.attempts, folder.timeline(0)]


def _stamp(files: Sequence[Path]) -> Stamp:
    """Sizes and times."""
    found: list[tuple[int, int]] = []
    for path in files:
        try:
            status = path.stat()
            found.append((status.st_size, status.st_mtime_ns))
        except OSError:
            found.append((-1, -1))
    return tuple(found)


def _timeline(run: RunSummary, folder: Path) -> Sequence[Section]:
    """A step of its ranks; none where a rank is just writing it, or a file is damaged."""
    try:
        recorded = read_recorded(folder)
    except UserError:
        return []
    if recorded is None:
        return []
    return sections_of(pipeline_of(recorded, run.plan), step_of(recorded, run.plan))


def row_of(name: str, run: RunSummary, now_s: float) -> dict[str, Any]:
    speed, steps = analysis.speed_of(run, recent=True), run.plan.get("steps")
    last = run.steps[-1] if run.steps else None
    evaluations = analysis.numbers_of(run.evaluations, "eval_loss")
    state = analysis.state_of(run, now_s)
    return {
        "name": name,
        "state": state,
        "job": str(run.plan.get("job")),
        "plan": str(run.plan.get("plan")),
        "world": run.plan.get("world") if isinstance(run.plan.get("world"), int) else None,
        "step": last["step"] if last else 0,
        "steps": steps if isinstance(steps, int) else None,
        "loss": analysis.numbers_of([last], "loss")[0] if last else None,
        "evaluation": evaluations[-1] if evaluations else None,
        "per_s": None if speed is None else speed.tokens_per_s or speed.samples_per_s,
        "unit": "tokens/s" if speed is not None and speed.tokens_per_s else "samples/s",
        "memory": max(last["memory_bytes"]) if last else None,
        "left_s": analysis.left_s(run) if state == "running" else None,
        "changed_s": run.changed_s,
    }


def list_page(root: Path, script: str) -> str:
    heads = ("", "run", "state", "plan", "step", "loss", "evaluation", "speed", "memory", "left", "written")
    columns = "".join(f"<th scope=col>{head}</th>" for head in heads)
    body = (
        '<p><label>only <input id=only type=search placeholder="name, plan or state"></label> '
        "<button class=button id=compare type=button>compare those chosen</button> "
        "<span id=count class=note></span></p>"
        "<div class=scroll tabindex=0 role=region aria-label=runs>"
        f"<table class=words><thead><tr>{columns}</tr></thead><tbody id=runs></tbody></table></div>"
        "<noscript><p>The list needs JavaScript.</p></noscript>"
    )
    return document(f"Runs in {root}", body, script=script)

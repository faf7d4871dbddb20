"""One row: a run is disturbed, goes on, and is held against one that nothing has disturbed."""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.faults.cases import (
    CLOCKS,
    NODES,
    PLAN_TEXTS,
    SAVE_EVERY,
    STALLS,
    STEPS,
    Case,
    expected,
    harmless,
    named_rightly,
)
from benchmarks.faults.damage import KINDS as DAMAGES
from benchmarks.faults.damage import damage, damage_newest, fill, forbid
from benchmarks.faults.launcher import ROOT, Ended, Launcher, Said
from benchmarks.lab.lab import Lab, address, down, why_not
from evenly.checkpoint.folder import CheckpointFolder
from evenly.checkpoint.manifest import Unsound
from evenly.checkpoint.pieces import read_tensor

JOB = Path(__file__).with_name("faulty_job.py")
LIMIT_S = 240.0  # of a command: a hang beyond is a row that fell short
STALL_LIMIT_S = 5.0  # that the runs are given where something stands still
NODES_LIMIT_S = 90.0  # of two launchers, once the fault has fired
CUT_S = 5.0
TOLERANCE = 1e-9
DISK_BYTES = 6 << 20  # of a disk that becomes full
SETTLED_S = 5.0  # for processes to be gone after a command has ended
MESSAGE = 600  # letters kept


@dataclass
class Row:
    """What came of a case.

    noticed_s: from the fault to the first word about it. lost: steps done again. difference: the largest of a tensor of
    the last checkpoint to the undisturbed run's, relative to the tensor's largest number. left: processes and files.
    short: in what the row falls short; skipped: why it was not run.
    """

    case: int
    fault: str
    place: str
    plan: str
    devices: int
    rank: int
    step: int
    goes_on: str
    fired_step: int | None = None
    noticed_s: float | None = None
    named: bool | None = None
    code: int | None = None
    lost: int | None = None
    difference: float | None = None
    left: list[str] = field(default_factory=list[str])
    message: str = ""
    short: list[str] = field(default_factory=list[str])
    skipped: str = ""
    seconds: float = 0.0


class Bench:
    """What the rows of one process share: kept launchers, the undisturbed run, and torn runs to begin with.

    folder: of its own; everything is in it, the temporary folder of the launchers too.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        _adopt_orphans()
        self._launchers: dict[str, Launcher] = {}
        self._lab: Lab | None = None
        self.no_network = why_not()
        self.no_mounts = "" if _may_mount() else "a file system of its own needs root"
        self._reference: dict[str, Any] | None = None

    def launcher(self, where: str = "here") -> Launcher:
        """The kept launcher: `here`, or on a node "0" or "1"."""
        found = self._launchers.get(where)
        if found is None or found.process.poll() is not None:
            prefix = [] if where == "here" else self.lab.within(int(where))
            found = self._launchers[where] = Launcher(self.environment, prefix)
        return found

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        own = {"TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        return {**os.environ, **own, "EVENLY_SECRET": "words of the campaign"}

    @property
    def lab(self) -> Lab:
        """Two nodes, up once they are asked for."""
        if self._lab is None:
            self._lab = Lab(name=f"f{os.getpid()}", nodes=2)
            self._lab.up()
        return self._lab

    def renew(self) -> None:
        """Ends the launchers: the next row has new ones."""
        for launcher in self._launchers.values():
            launcher.close()
        self._launchers.clear()

    def close(self) -> None:
        self.renew()
        if self._lab is not None:
            down(self._lab.name)

    def run(self, arguments: list[object], folder: Path) -> Ended:
        launcher = self.launcher()
        launcher.begin(arguments, folder)
        return launcher.wait(LIMIT_S)

    def reference(self) -> dict[str, Any]:
        """The tensors of the last checkpoint of a run on one device that nothing has disturbed."""
        if self._reference is None:
            ended = self.run(command("single", 1, self.folder / "alone"), self.folder)
            if ended.code != 0:
                raise SystemExit(f"the undisturbed run failed:\n{ended.text}")
            self._reference = tensors(CheckpointFolder(self.folder / "alone"), STEPS)
        return self._reference

    def begun(self, plan: str, devices: int) -> Path:
        """The folder of a run of seven steps: its checkpoints are of steps 3, 6 and 7."""
        place = self.folder / f"begun-{plan}"
        if not place.exists():
            ended = self.run([*command(plan, devices, place), "--steps", 7], self.folder)
            if ended.code != 0:
                raise SystemExit(f"the undisturbed run failed:\n{ended.text}")
        return place


def command(plan: str, devices: int, out: Path) -> list[object]:
    return ["run", JOB, "--plan", PLAN_TEXTS.get(plan, plan), "--devices", devices, "--out", out]


def run_case(case: Case, bench: Bench) -> Row:
    """The row of `case`."""
    began = time.monotonic()
    facts = {key: value for key, value in asdict(case).items() if key != "number"}
    row = Row(case=case.number, **facts)
    row.skipped = _reason_to_skip(case, bench)
    if not row.skipped:
        folder = bench.folder / f"case-{case.number}"
        folder.mkdir()
        try:
            _Disturbed(case, bench, row, folder).run()
        finally:
            _unmount_below(folder)
            shutil.rmtree(folder, ignore_errors=True)
        if row.short:
            bench.renew()
    row.seconds = round(time.monotonic() - began, 1)
    return row


def _reason_to_skip(case: Case, bench: Bench) -> str:
    if case.fault in NODES:
        return bench.no_network
    return bench.no_mounts if case.fault in ("disk-full", "read-only") else ""


class _Disturbed:
    """The run of one case."""

    def __init__(self, case: Case, bench: Bench, row: Row, folder: Path) -> None:
        self.case, self.bench, self.row, self.folder = case, bench, row, folder
        self.marks, self.out = folder / "marks", folder / "out"
        self.marks.mkdir()
        self.over = threading.Event()  # the disturbed command is

    def run(self) -> None:
        self.bench.reference()
        if self.case.fault in (*DAMAGES, "foreign-job", "all-damaged") and self.case.place == "before":
            self.bench.begun(self.case.plan, self.case.devices)
        files = self._files()
        first = self._disturb()
        self._judge(first)
        told = first
        if expected(self.case).code != 0 and self._is_to_go_on(first):
            told = self._go_on()
        self._judge_torn(told)
        self._judge_end()
        self._judge_left(files)

    # ------------------------------------------------------------------------------------------- the disturbed run
    def _disturb(self) -> Ended:
        case = self.case
        if case.fault in NODES:
            return self._two_nodes()
        arguments = command(case.plan, case.devices // (2 if case.fault == "port-taken" else 1), self.out)
        if case.place == "before":
            arguments += self._prepare()
        if case.planted:
            arguments += ["--set", f"fault={case.planted}", "--set", f"marks={self.marks}"]
        if case.goes_on == "restarts":
            arguments += ["--restarts", 3]
        if case.fault in STALLS:
            arguments += ["--stall-limit", STALL_LIMIT_S]
        if case.fault == "disk-full" and case.place != "before":
            self._mount_small()
        launcher = self.bench.launcher()
        clock = self._clock() if case.fault in CLOCKS and case.place == "machine" else None
        launcher.begin(arguments, self.folder, clock)
        with _others(self._jump(clock)) if clock else _nothing():
            ended = launcher.wait(LIMIT_S)
            self.over.set()
        return ended

    def _clock(self) -> Path:
        return self.marks / "hours"

    def _jump(self, clock: Path) -> Callable[[], None]:
        def follow() -> None:
            if self._await_fired():
                part = clock.with_suffix(".part")
                part.write_text("1" if self.case.fault == "clock-forward" else "-1")
                part.rename(clock)

        return follow

    def _prepare(self) -> list[object]:
        """What is done before the command; the words that it needs besides."""
        case = self.case
        self._fired_now()
        if case.fault == "disk-full":
            self._mount_small()
            fill(self.out)
            return []
        if case.fault == "read-only":
            self.out.mkdir()
            forbid(self.out)
            return []
        if case.fault == "port-taken":
            self.taken = socket.create_server(("127.0.0.1", 0))
            port = self.taken.getsockname()[1]
            return ["--nodes", 2, "--node-rank", 0, "--rendezvous", f"127.0.0.1:{port}"]
        shutil.copytree(self.bench.begun(case.plan, case.devices), self.out)
        folder = CheckpointFolder(self.out)
        if case.fault == "all-damaged":
            for step in folder.steps():
                damage(folder, step, "truncated")
        elif case.fault == "foreign-job":
            self._put_foreign(folder)
        else:
            damage_newest(self.out, case.fault)
        self._fired_now()
        return ["--resume"]

    def _put_foreign(self, folder: CheckpointFolder) -> None:
        """The newest checkpoint becomes another job's, which is sound."""
        place = self.folder / "foreign"
        ended = self.bench.run([*command("single", 1, place), "--set", "width=3", "--steps", 9], self.folder)
        if ended.code != 0:
            self.row.short.append("the other job failed")
        shutil.copytree(CheckpointFolder(place).path(9), folder.path(9))
        shutil.rmtree(place)

    def _mount_small(self) -> None:
        self.out.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", self.out], check=True)

    def _fired_now(self) -> None:
        self.fired = {"time_s": time.monotonic(), "rank": self.case.rank, "step": 0}

    def _await_fired(self) -> bool:
        until = time.monotonic() + LIMIT_S
        while not self.over.wait(0.01) and time.monotonic() < until:
            if any(self.marks.glob("fired-*.json")):
                return True
        return False

    def _two_nodes(self) -> Ended:
        """Two launchers, each in its namespace; the second's words follow the first's."""
        case, port = self.case, 20000 + self.case.number % 10000
        arguments = command(case.plan, case.devices // 2, self.out)
        arguments += ["--set", f"fault={case.planted}", "--set", f"marks={self.marks}"]
        arguments += ["--nodes", 2, "--rendezvous", f"{address(0)}:{port}"]
        arguments += ["--stall-limit", STALL_LIMIT_S if case.fault in STALLS else LIMIT_S]
        launchers = [self.bench.launcher("0"), self.bench.launcher("1")]
        for node, launcher in enumerate(launchers):
            launcher.begin([*arguments, "--node-rank", node], self.folder)
        with _others(lambda: self._act_from_outside(launchers)):
            self._await_fired()
            ended = [launcher.wait(NODES_LIMIT_S) for launcher in launchers]
            self.over.set()
        self.bench.lab.plug_back(1)
        said = sorted((line for one in ended for line in one.said), key=lambda line: line.time_s)
        codes = [one.code for one in ended]
        if case.fault == "node-gone":
            codes = codes[:1]  # of the second nothing is left
        code = None if None in codes else max(code for code in codes if code is not None)
        if not (self.marks / "done").exists():
            self.row.short.append("nothing was done from outside")
        if case.fault == "cut" and 0 in codes:
            self.row.short.append(f"a node that was cut off ended with exit codes {codes}")
        return Ended(code, max(one.time_s for one in ended), tuple(said))

    def _act_from_outside(self, launchers: list[Launcher]) -> None:
        if not self._await_fired():
            return
        if self.case.fault == "node-gone":
            launchers[1].process.kill()
        else:
            self.bench.lab.pull_out(1)
        (self.marks / "done").touch()
        self._fired_now()
        if self.case.fault == "cut-5s":
            time.sleep(CUT_S)
            self.bench.lab.plug_back(1)

    # ------------------------------------------------------------------------------------------------ going on
    def _is_to_go_on(self, first: Ended) -> bool:
        """Whether it takes a second command, after which the first is not expected to have come to the end."""
        return not (self.case.goes_on == "restarts" and first.code == 0) and self.case.fault != "all-damaged"

    def _go_on(self) -> Ended:
        case = self.case
        if case.fault == "port-taken":
            self.taken.close()
        _unmount_below(self.folder, keep=self.out if case.fault == "disk-full" and case.place != "before" else None)
        (self.out / "ballast").unlink(missing_ok=True)
        begun = bool(CheckpointFolder(self.out).steps())
        if case.fault == "foreign-job":
            CheckpointFolder(self.out).remove(9)
        if not begun and (self.out / "metrics.jsonl").exists():
            for one in self.out.iterdir():  # disturbed before its first checkpoint; the folder itself may be a mount
                shutil.rmtree(one) if one.is_dir() else one.unlink()
        marks = ["--set", f"fault={case.planted}", "--set", f"marks={self.marks}"] if case.planted else []
        again = [*command(case.plan, case.devices, self.out), *marks, *(["--resume"] if begun else [])]
        ended = self.bench.run(again, self.folder)
        if ended.code != 0:
            self.row.short.append(f"going on ended with exit code {ended.code}: {ended.text[-MESSAGE:]}")
        return ended

    # --------------------------------------------------------------------------------------------- judging it
    def _judge(self, first: Ended) -> None:
        case, row, wanted = self.case, self.row, expected(self.case)
        fired = self._fired()
        row.fired_step = fired and fired["step"]
        row.code = first.code
        if fired is None and case.fault != "none":
            row.short.append("the fault never fired")
            row.message = first.text[-MESSAGE:]
            return
        if first.code is None and case.fault != "node-gone":
            row.short.append(f"no end within {LIMIT_S:.0f} s: {first.text[-MESSAGE:]}")
            return
        about = [line for line in first.said if fired and line.time_s >= fired["time_s"]]
        row.message = _shortened(_message(about))
        row.named = named_rightly(case, _message(about) if wanted.notices else "")
        if not row.named:
            row.short.append("it does not say what it has to")
        first_word = next((line for line in about if line.text.startswith("evenly: ")), None)
        if wanted.notices and wanted.words:
            if first_word is not None and fired is not None:
                row.noticed_s = round(first_word.time_s - fired["time_s"], 2)
        elif first_word is not None and not wanted.notices:
            row.short.append(f"it complains: {first_word.text}")
        code = 0 if case.goes_on == "restarts" else wanted.code
        if first.code == 0 if code is None else first.code != code:
            row.short.append(f"exit code {first.code}, expected {'another than 0' if code is None else code}")

    def _fired(self) -> dict[str, Any] | None:
        marks = [json.loads(path.read_text()) for path in sorted(self.marks.glob("fired-*.json"))]
        if hasattr(self, "fired"):  # by the campaign itself; the step is the job's
            return self.fired | ({"step": marks[0]["step"]} if marks else {})
        return marks[0] if marks else None

    def _judge_torn(self, told: Ended) -> None:
        """Whether a checkpoint that was damaged within the run was told of when it went on."""
        damaged = self.case.fault in DAMAGES and self.case.place != "before" and not harmless(self.case)
        if damaged and not any("is not sound (" in line.text for line in told.said):
            self.row.short.append("the damaged checkpoint was passed over without a word")

    def _judge_end(self) -> None:
        row, folder = self.row, CheckpointFolder(self.out)
        if self.case.fault == "all-damaged":
            return
        row.lost = _steps_done_again(self.out / "metrics.jsonl")
        # One checkpoint may be on its way while the next steps are done, and one may be damaged.
        if row.lost is not None and row.lost > SAVE_EVERY * (2 if harmless(self.case) else 3):
            row.short.append(f"{row.lost} steps were lost")
        for step in folder.steps():
            try:
                folder.check(step)
            except Unsound as reason:
                if self.case.fault not in DAMAGES:
                    row.short.append(f"the checkpoint of step {step} is not sound: {reason}")
        try:
            row.difference = difference(tensors(folder, STEPS), self.bench.reference())
        except Unsound as reason:
            row.short.append(f"there is no last checkpoint: {reason}")
            return
        if not row.difference <= TOLERANCE:
            row.short.append(f"the numbers differ by {row.difference:.2g}")

    # ------------------------------------------------------------------------------------------ what is left
    def _judge_left(self, before: set[str]) -> None:
        if any("/sem.mp-" in name for name in self._files() - before):
            self.bench.renew()  # a process removes its semaphores when it ends
        files = self._files() - before
        if self.case.fault == "node-gone":  # what a launcher that was killed leaves goes with a later launch
            files = {name for name in files if not Path(name).name.startswith("evenly-")}
        self.row.left += [f"file {name}" for name in sorted(files)]
        hidden = [path.name for path in (self.out / "checkpoints").glob(".*") if path.name != ".lock"]
        self.row.left += [f"folder {name}" for name in sorted(hidden)]
        until = time.monotonic() + SETTLED_S
        while (left := self._processes()) and time.monotonic() < until:
            time.sleep(0.05)
        for process in left:
            self.row.left.append(f"process {process.pid}")
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if self.row.left:
            self.row.short.append(f"left: {', '.join(self.row.left)}")

    def _files(self) -> set[str]:
        """Names in the temporary folder and in the memory that processes share, but those of kept servers."""
        found = [*self.bench.temporary.iterdir(), *Path("/dev/shm").iterdir()]
        return {str(path) for path in found if not path.name.startswith("pymp-")}

    def _processes(self) -> list[psutil.Process]:
        """What descends from this process, but the kept launchers and their servers."""
        kept = {launcher.process.pid for launcher in self.bench._launchers.values()}
        found: list[psutil.Process] = []
        for process in psutil.Process().children(recursive=True):
            try:
                of_launcher = process.pid in kept or process.ppid() in kept
                if not of_launcher and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found


def _message(said: list[Said]) -> str:
    """What of it is of evenly's errors, and not of progress."""
    lines: list[str] = []
    within = False
    for line in said:
        within = line.text.startswith("evenly: ") or (within and line.text.startswith("  "))
        if within:
            lines.append(line.text)
    return "\n".join(lines)


def _shortened(text: str) -> str:
    return text if len(text) <= MESSAGE else text[: MESSAGE - 3] + "..."


# ------------------------------------------------------------------------------------------------------ numbers
def tensors(folder: CheckpointFolder, step: int) -> dict[str, Any]:
    """All tensors of a checkpoint, whole; `Unsound` where there is none that can be read."""
    from evenly.checkpoint.pieces import find_pieces

    manifest = folder.check(step)
    pieces = find_pieces(folder.path(step), manifest.files, manifest.tensors)
    return {name: _numbers(read_tensor(form, pieces[name]), form.dtype) for name, form in manifest.tensors.items()}


def _numbers(whole: Any, dtype: str) -> Any:
    return np.ascontiguousarray(whole).view(np.dtype(dtype)).reshape(whole.shape[:-1]).astype(np.float64)


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of a tensor, relative to the largest number in it; infinite where they have others."""
    if one.keys() != other.keys() or any(one[name].shape != other[name].shape for name in one):
        return math.inf
    most = 0.0
    for name, wanted in other.items():
        scale = float(np.abs(wanted).max(initial=0.0)) or 1.0
        gap = float(np.abs(one[name] - wanted).max(initial=0.0)) / scale
        most = max(most, math.inf if math.isnan(gap) else gap)
    return most


def _steps_done_again(metrics: Path) -> int | None:
    """How many steps were done twice, by the run's metrics."""
    done: list[int] = []
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if "loss" in found and "weight" in found and "step" in found:
            done.append(found["step"])
    return len(done) - len(set(done)) if done else None


# ---------------------------------------------------------------------------------------------------- the system
def _adopt_orphans() -> None:
    """What loses its parent becomes a child of this process, which can then find it."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _may_mount() -> bool:
    return os.geteuid() == 0 and shutil.which("mount") is not None


def _unmount_below(folder: Path, keep: Path | None = None) -> None:
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for place in sorted((one for one in mounted if one.startswith(str(folder))), reverse=True):
        if Path(place) != keep:
            subprocess.run(["umount", "-l", place], check=False)


@contextmanager
def _others(act: Callable[[], None]) -> Iterator[None]:
    """Within, `act` runs beside."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    yield
    thread.join()


@contextmanager
def _nothing() -> Iterator[None]:
    yield

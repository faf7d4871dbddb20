"""One run of one contender: started, paused between turns, and ended with everything it started.

Every process of a run carries the run's own PEER_RUN in its environment. Launchers put their workers into
sessions of their own and may die before them, so it is by this mark that the last one is found and ended.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from contenders import BIN, CONTENDERS, HERE

OUT = HERE / "out"
MARK = "PEER_RUN"
RUN_TIMEOUT_S = 900.0
TURN_TIMEOUT_S = 600.0
KILL_TIMEOUT_S = 10.0


def free_port() -> int:
    """A port nobody holds, below the range from which the system itself takes ports for connections."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Run:
    """A started contender; ends all its processes when the `with` block is left.

    out:      the JSON that its recorder writes; whatever else it writes begins with the same name.
    env:      added to the environment. launcher: instead of the contender's own. arguments: for the script.
    """

    def __init__(
        self,
        name: str,
        workload: str,
        steps: int,
        tag: str,
        *,
        env: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        launcher: Sequence[str] | None = None,
    ) -> None:
        contender = CONTENDERS[name]
        self.name, self.out = name, OUT / tag / f"{workload}.{name}.json"
        self.log = self.out.with_suffix(".log")
        _clear(self.out)
        port, self._mark = str(free_port()), uuid.uuid4().hex
        command = [part.format(port=port) for part in launcher or contender.launcher]
        command += [str(HERE / "runners" / contender.script), *contender.arguments, "--workload", workload]
        command += ["--steps", str(steps), "--out", str(self.out), "--ranks", str(contender.ranks), *arguments]
        environment = {
            **os.environ,
            **_environment(contender.threads),
            **{key: value.format(port=port) for key, value in contender.env.items()},
            **(env or {}),
            MARK: self._mark,
            "PEER_T0": str(time.time()),
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=self.out.parent
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def alive(self) -> bool:
        """Whether the launcher still runs."""
        return self.process.poll() is None

    def kill(self) -> None:
        """End the launcher and whatever it left behind; again until none is found: they may be forking."""
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while (family := [*self._family()]) and time.monotonic() < deadline:
            for process in family:
                try:
                    process.kill()
                except psutil.Error:
                    pass
            self.process.poll()
            time.sleep(0.02)
        self.process.poll()

    def result(self, timeout_s: float = RUN_TIMEOUT_S) -> dict:
        """What the recorder wrote once the run is over; {"error": end of the log} if it wrote nothing."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        self.kill()
        if not self.out.exists():
            return {"error": "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])}
        return json.loads(self.out.read_text())

    def _family(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except psutil.Error:
                continue


def _clear(out: Path) -> None:
    """Make the folder, without anything an earlier run of the same name left in it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for old in out.parent.glob(f"{out.stem}.*"):
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()


def _environment(threads: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(threads),
        "DS_ACCELERATOR": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_EXTENSIONS_DIR": str(OUT / "ext"),
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }


class Turns:
    """A run that stops at a gate after each turn until it is let on.

    Every rank says that it is there by a file, and waits by reading its fifo. The fifos are held open for
    reading and writing on this side: so neither side ever waits for the other to open its end, and a dead
    rank cannot break the pipe. When this process dies, the waiting ranks read the end of the file and leave.

    warm, turn: steps before the first stop and between stops. rounds: turns after the warm-up.
    """

    def __init__(self, name: str, workload: str, tag: str, *, warm: int, turn: int, rounds: int) -> None:
        self.name, self._ranks = name, range(CONTENDERS[name].ranks)
        self._gate = OUT / tag / f"gate.{workload}.{name}"
        shutil.rmtree(self._gate, ignore_errors=True)
        self._gate.mkdir(parents=True)
        self._fifos = [_fifo(self._gate / f"rank{rank}.fifo") for rank in self._ranks]
        self._warm, self._turn, self._done = warm, turn, 0
        self.steps = warm + turn * rounds
        env = {"PEER_GATE": str(self._gate), "PEER_TURNS": f"{warm}:{turn}"}
        self.run = Run(name, workload, self.steps, tag, env=env)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run.kill()
        for fifo in self._fifos:
            os.close(fifo)
        shutil.rmtree(self._gate, ignore_errors=True)

    def warm_up(self) -> bool:
        """Wait for the first stop; whether it was reached."""
        return self._reach(self._warm)

    def take_turn(self) -> bool:
        """Let the ranks on and wait until all stand at the gate again; the last turn ends the run."""
        for fifo in self._fifos:
            os.write(fifo, b".")
        return self._reach(self._done + self._turn)

    def _reach(self, target: int) -> bool:
        deadline = time.monotonic() + TURN_TIMEOUT_S
        while not self._reached(target):
            if time.monotonic() > deadline or not (self.run.alive() or self._reached(target)):
                return False
            time.sleep(0.01)
        self._done = target
        return True

    def _reached(self, target: int) -> bool:
        if target >= self.steps:
            return not self.run.alive() and self.run.out.exists()
        return all((self._gate / f"rank{rank}.{target}").exists() for rank in self._ranks)


def _fifo(path: Path) -> int:
    os.mkfifo(path)
    return os.open(path, os.O_RDWR)

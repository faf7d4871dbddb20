"""A launcher that is kept: `evenly` commands one after the other in one process, whose fork server is warm.

    python -m benchmarks.faults.launcher 5      reads commands, a JSON object a line, and answers to file descriptor 5

A command is run as from the terminal, to its exit code. Importing torch anew for each takes longer than all the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HOUR_S = 3600.0
LAST = "the command has ended"  # after all that it says
SAID_LIMIT_S = 5.0
READY_LIMIT_S = 600.0  # to import torch, on a machine that is busy


@dataclass(frozen=True)
class Said:
    """A line of the launcher or of its first rank; time_s: when it came, by the monotonic clock."""

    time_s: float
    text: str


@dataclass(frozen=True)
class Ended:
    """How a command has ended; code: None where it had not, within its time, or its launcher is gone."""

    code: int | None
    time_s: float
    said: tuple[Said, ...]

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.said)


@dataclass
class Launcher:
    """The process, from the side of the campaign.

    prefix: words before the command, such as those that enter a network namespace.
    """

    environment: dict[str, str]
    prefix: Sequence[str] = ()
    said: list[Said] = field(default_factory=list[Said])

    def __post_init__(self) -> None:
        answers, theirs = os.pipe()
        command = [*self.prefix, sys.executable, "-m", "benchmarks.faults.launcher", str(theirs)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            pass_fds=[theirs], env=self.environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self._answered: list[tuple[float, int]] = []
        self._came = threading.Condition()
        self._begun = 0
        for read in (self._listen, self._wait_for_answers):
            threading.Thread(target=read, daemon=True).start()

        if self._answer(READY_LIMIT_S)[1] is None:
            raise TimeoutError(f"no launcher within {READY_LIMIT_S:.0f} s: {self.said}")

    def _answer(self, limit_s: float) -> tuple[float, int | None]:
        """The next answer, with its time; None where it does not come."""
        until = time.monotonic() + limit_s
        with self._came:
            while not self._answered and self.process.poll() is None and (left := until - time.monotonic()) > 0:
                self._came.wait(min(left, 0.5))
            return self._answered.pop() if self._answered else (time.monotonic(), None)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(Said(time.monotonic(), line.decode(errors="replace").rstrip("\n")))

    def _wait_for_answers(self) -> None:
        for line in self._answers:
            with self._came:
                self._answered.append((time.monotonic(), int(line)))
                self._came.notify_all()
        with self._came:
            self._came.notify_all()

    def begin(self, arguments: Sequence[object], folder: Path, clock: Path | None = None) -> None:
        """Starts a command; clock: a file, once it is there the launcher's clock jumps by the hours that it says."""
        assert self.process.stdin is not None
        asked = {"arguments": [str(one) for one in arguments], "folder": str(folder), "clock": clock and str(clock)}
        self._begun = len(self.said)
        self.process.stdin.write((json.dumps(asked) + "\n").encode())
        self.process.stdin.flush()

    def wait(self, limit_s: float) -> Ended:
        """The end of the command that was begun."""
        ended_s, code = self._answer(limit_s)
        until = time.monotonic() + (SAID_LIMIT_S if code is not None else 0.0)
        while LAST not in [line.text for line in self.said[self._begun :]] and time.monotonic() < until:
            time.sleep(0.01)  # it is on its way
        said = self.said[self._begun :]
        return Ended(code, ended_s, tuple(line for line in said if line.text != LAST))

    def close(self) -> None:
        """Ends it, as a terminal that closes would."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(5.0)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()


# ------------------------------------------------------------------------------------------ the process itself
def serve(answers: int) -> None:
    """Runs what comes on stdin until that closes."""
    from evenly.cli.main import main
    from evenly.cli.run import PRELOAD
    from evenly.launcher.agent import warm_up

    warm_up([*PRELOAD, "evenly.train.snapshots"])
    import evenly.train.loop
    import evenly.train.resume  # noqa: F401  (what a command imports)

    commands = os.fdopen(os.dup(0), "r")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.write(answers, b"0\n")
    for line in commands:
        asked = json.loads(line)
        with_clock(asked["clock"])
        os.chdir(asked["folder"])
        code = one_command(main, asked["arguments"])
        sys.stderr.flush()
        print(LAST, flush=True)
        os.chdir(ROOT)
        os.write(answers, f"{code}\n".encode())


def one_command(main: Any, arguments: list[str]) -> int:
    sys.argv = ["evenly", *arguments]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:  # as the interpreter does
        traceback.print_exc()
        return 1
    return 0


REAL_TIME = time.time


def with_clock(path: str | None) -> None:
    """Lets `time.time` of this process follow the file at `path`."""
    time.time = REAL_TIME
    if path is None:
        return

    def jumped() -> float:
        return REAL_TIME() + (HOUR_S * float(Path(path).read_text() or 0) if Path(path).exists() else 0.0)

    time.time = jumped


if __name__ == "__main__":
    serve(int(sys.argv[1]))

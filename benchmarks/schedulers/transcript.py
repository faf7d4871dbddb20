"""Commands that run on the nodes of a lab, printed with what they print, as a page of the documentation has them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import psutil
from safetensors.torch import load_file

from benchmarks.lab.lab import ROOT, Lab

LIMIT_S = 300.0
NOISE = re.compile(r"^(\[W.*|-{20,}|={20,}|)$")  # of torch's name look-ups, and rules

STEP = re.compile(r"(\(RayTrainWorker .*\) )?step \d+/")  # of several in a row the first and the last are enough


@dataclass
class Transcript:
    """What is done in `folder`, which all nodes of the lab see.

    variables: further ones of the environment. noise: lines that are left out.
    """

    lab: Lab
    folder: Path
    variables: dict[str, str] = field(default_factory=dict[str, str])
    noise: re.Pattern[str] = NOISE

    def say(self, text: str) -> None:
        """A line between commands."""
        print(f"\n# {text}", flush=True)

    def run(
        self,
        command: str,
        *,
        code: tuple[int, ...] = (0,),
        ask: signal.Signals | None = None,
        meanwhile: Callable[[], None] | None = None,
        when: Callable[[str], bool] = bool,
    ) -> str:
        """What `command` prints on node 0; `code`: what it may exit with.

        ask: sent, and meanwhile: called, once `when` holds of its output.
        """
        print(f"$ {command}", flush=True)
        log = self.folder / ".output"
        with log.open("w") as output:
            process = self.start(command, output=output)
            try:
                if ask is not None or meanwhile is not None:
                    wait_until(lambda: when(log.read_text()) or process.poll() is not None)
                if meanwhile is not None:
                    meanwhile()
                if ask is not None:
                    print(f"(it gets {ask.name})")
                    process.send_signal(ask)
                found = process.wait(LIMIT_S)
            finally:
                process.kill()
        text = self.cleaned(log.read_text())
        print(text + (f"\n(exit code {found})" if found else ""), flush=True)
        if found not in code:
            raise RuntimeError(f"{command}: exit code {found}, not {' or '.join(map(str, code))}")
        return text

    def start(self, command: str, *, node: int = 0, output: object = None) -> subprocess.Popen[bytes]:
        """`command` on a node."""
        return subprocess.Popen(
            [*self.lab.within(node), "sh", "-c", f"exec {command}" if "&&" not in command else command],
            cwd=self.folder, env=self.environment, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        """Of all commands."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
        own = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "EVENLY_SECRET": "of these nodes"}
        return {**os.environ, **own, **self.variables}

    def cleaned(self, text: str) -> str:
        """`text` without this machine's paths, and without lines that tell nothing."""
        text = text.replace(f"{self.folder}/", "").replace(str(self.folder), ".").replace("\r", "")
        lines = [line.rstrip() for line in text.splitlines() if not self.noise.match(line)]
        between = [all(map(STEP.match, lines[n - 1 : n + 2])) and 0 < n < len(lines) - 1 for n in range(len(lines))]
        shortened = [line if not left_out else "..." for line, left_out in zip(lines, between, strict=True)]
        return "\n".join(line for line, _ in groupby(shortened))

    def check_same(self, run: str, other: str) -> None:
        """Raises where two runs have not ended with the same weights, in float64, tensor by tensor."""
        difference = max(
            float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-300))
            for ours, theirs in zip(self._weights(run), self._weights(other), strict=True)
        )
        print(f"# weights of {run} and {other}: largest relative difference of a tensor {difference:.1e}", flush=True)
        if not difference < 1e-9:
            raise RuntimeError(f"{run} and {other} differ")

    def _weights(self, run: str) -> list[object]:
        to = self.folder / f"{run}.exported"
        if not to.exists():
            command = [sys.executable, "-m", "evenly", "export", run, "--to", str(to)]
            subprocess.run(command, cwd=self.folder, env=self.environment, check=True, capture_output=True)
        found = {name: tensor for file in to.glob("*.safetensors") for name, tensor in load_file(file).items()}
        return [found[name] for name in sorted(found)]

    def check_nothing_left(self) -> None:
        """Raises where a rank is still there."""
        wait_until(lambda: not self._ranks(), limit_s=10.0)
        print("# no process is left", flush=True)

    def _ranks(self) -> list[int]:
        return [p.pid for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(self.folder) and _is_python(p)]


def _is_python(process: psutil.Process) -> bool:
    try:
        return "python" in process.name()
    except psutil.Error:
        return False


def wait_until(found: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Raises `TimeoutError` where it is not so within `limit_s`."""
    until_s = time.monotonic() + limit_s
    while not found():
        if time.monotonic() > until_s:
            raise TimeoutError(f"not within {limit_s:.0f} s")
        time.sleep(0.2)

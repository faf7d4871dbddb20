"""What a runner needs to be measured.  One per process:

    rec = Recorder()                  # parses --workload --steps --out, notes the import time
    rec.micro(mean_loss, batch)       # after each microbatch's backward
    rec.step()                        # after each finished optimizer step
    rec.eval(mean_loss, n_samples)    # once, optional
    rec.finish(state_dict)            # rank 0 passes the full state dict; writes --out

Every rank writes OUT.rankN.json; rank 0 merges them into OUT.  The environment may hold
PEER_T0 (launch time), PEER_GATE (directory with one fifo per rank: pause between turns, so that
contenders can be interleaved inside one run), PEER_FAULT (kill:RANK:STEP or sleep:RANK:STEP),
PEER_MEMPROF (trace CPU tensor allocations), TORCH_FR_BUFFER_SIZE (count the collectives of the second step).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import pathlib
import signal
import time

import torch
from collectives import Collectives
from workloads import WORKLOADS

MERGE_TIMEOUT_S = 60
STUCK_S = 7200  # a stuck rank outlasts every time limit of the contenders, but not a benchmark that died


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status, such as VmRSS."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _process_start() -> float:
    """When this process began, s since the epoch."""
    ticks = int(pathlib.Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    lines = pathlib.Path("/proc/stat").read_text().splitlines()
    boot = next(int(line.split()[1]) for line in lines if line.startswith("btime"))
    return boot + ticks / os.sysconf("SC_CLK_TCK")


def _open_fifo(path: pathlib.Path) -> io.FileIO:
    """For reading, without waiting for a writer: where the benchmark is gone there will be none."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return io.FileIO(descriptor)


def _write(path: pathlib.Path, data: dict) -> None:
    """Whole or not at all: others wait for the file to appear."""
    part = path.with_suffix(".tmp")
    part.write_text(json.dumps(data))
    part.rename(path)


def clean_name(name: str) -> str:
    for prefix in ("_orig_mod.", "_forward_module.", "module.", "model."):
        name = name.removeprefix(prefix)
    return name


class Recorder:
    def __init__(self, *extra: tuple[str, dict]):
        parser = argparse.ArgumentParser()
        parser.add_argument("--workload", required=True)
        parser.add_argument("--steps", type=int, default=20)
        parser.add_argument("--out", type=pathlib.Path, required=True)
        parser.add_argument("--ranks", type=int, default=2)
        parser.add_argument("--eval", action="store_true")
        parser.add_argument("--local_rank", type=int)  # DeepSpeed's launcher passes it
        for name, kwargs in extra:
            parser.add_argument(name, **kwargs)
        self.args = parser.parse_args()
        self.out, self.steps = self.args.out.resolve(), self.args.steps
        self.workload = WORKLOADS[self.args.workload]
        self.process_start = _process_start()
        self.import_seconds = time.time() - self.process_start
        self.launch = float(os.environ.get("PEER_T0", self.process_start))
        self.rss_imports = _status("VmRSS")
        self.step_begins, self.step_times, self.micro_log, self._pending = [], [], [], []
        self.first_step = self.evaluation = None
        self.offset = 0  # steps done before a resume
        self._profile = None
        if os.environ.get("PEER_MEMPROF"):
            self._profile = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)
            self._profile.__enter__()
        self._counter = Collectives() if "TORCH_FR_BUFFER_SIZE" in os.environ else None
        self._collectives = None
        self._fifo = None
        self._clock = time.perf_counter()

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))

    def train_set(self):
        return self.workload.train_set(self.steps)

    # ------------------------------------------------------------ called by the runner
    def micro(self, mean_loss, batch) -> None:
        labels = batch["labels"] if isinstance(batch, dict) else batch
        self._pending.append((float(mean_loss.detach()), int((labels != -100).sum()), labels.numel(), len(labels)))

    def step(self) -> None:
        self.step_begins.append(self._clock)
        self.step_times.append(time.perf_counter() - self._clock)
        self.micro_log.append(self._pending)
        self._pending = []
        done = len(self.step_times)
        if done == 1:
            self.first_step = time.time() - self.launch
        if self._counter and done == 1:
            self._counter.begin()
        if self._counter and done == 2:
            self._collectives = self._counter.end()
        self._fault(done + self.offset)
        self._gate(done)
        self._clock = time.perf_counter()

    def eval(self, mean_loss, n_samples) -> None:
        self.evaluation = {"loss": float(mean_loss), "samples": int(n_samples)}

    def finish(self, state_dict=None) -> None:
        tensor_peak = None
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            tensor_peak = self._tensor_peak()
        mine = {
            "step_begins": self.step_begins,
            "step_times": self.step_times,
            "micro": self.micro_log,
            "left_over_micro": self._pending,
            "peak_rss": _status("VmHWM"),
            "rss_after_imports": self.rss_imports,
            "tensor_peak": tensor_peak,
            "collectives": self._collectives,
            "launch": self.launch,
            "process_start": self.process_start,
            "import_seconds": self.import_seconds,
            "time_to_first_step": self.first_step,
            "eval": self.evaluation,
        }
        rank, world = self.rank, self.args.ranks
        if rank == 0 and state_dict is not None:
            params = {clean_name(k): v.detach().cpu().clone() for k, v in state_dict.items()}
            torch.save(params, self.out.with_suffix(".pt"))
            blob = b"".join(params[k].contiguous().numpy().tobytes() for k in sorted(params))
            mine["final_param_checksum"] = hashlib.sha256(blob).hexdigest()[:16]
            mine["final_params"] = str(self.out.with_suffix(".pt"))
        _write(self.out.with_suffix(f".rank{rank}.json"), mine)
        if rank == 0:
            self._merge(world)

    # ------------------------------------------------------------ inner workings
    def _merge(self, world: int) -> None:
        parts, deadline = [], time.monotonic() + MERGE_TIMEOUT_S
        for r in range(world):
            file = self.out.with_suffix(f".rank{r}.json")
            while not file.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            parts.append(json.loads(file.read_text()))
        first = parts[0]
        steps = [[m for p in parts for m in p["micro"][s]] for s in range(len(first["micro"]))]
        result = {
            "workload": self.args.workload,
            "step_begins": first["step_begins"],
            "step_times": first["step_times"],
            "tokens_or_samples": [sum(m[1] for m in s) for s in steps],
            "padded": [sum(m[2] for m in s) for s in steps],
            "samples": [sum(m[3] for m in s) for s in steps],
            # the loss over all real tokens of the step, and what averaging microbatch means reports
            "losses": [sum(m[0] * m[1] for m in s) / max(1, sum(m[1] for m in s)) for s in steps],
            "mean_of_means": [sum(m[0] for m in s) / max(1, len(s)) for s in steps],
            "samples_never_applied": sum(m[3] for p in parts for m in p["left_over_micro"]),
            "peak_rss_per_rank": [p["peak_rss"] for p in parts],
            "rss_after_imports": [p["rss_after_imports"] for p in parts],
            "tensor_peak_per_rank": [p["tensor_peak"] for p in parts],
            "collectives": first["collectives"],
            "launch": first["launch"],
            "process_start": first["process_start"],
            "import_seconds": first["import_seconds"],
            "time_to_first_step": first["time_to_first_step"],
            "final_param_checksum": first.get("final_param_checksum"),
            "final_params": first.get("final_params"),
            "eval": first["eval"],
        }
        _write(self.out, result)

    def _tensor_peak(self) -> int:
        """Highest sum of live CPU tensor bytes, from the profiler's allocation events."""
        events = [e for e in self._profile.kineto_results.events() if e.name() == "[memory]"]
        live = peak = 0
        for e in sorted(events, key=lambda e: e.start_ns()):
            live += e.nbytes()
            peak = max(peak, live)
        return peak

    def _fault(self, done: int) -> None:
        kind, rank, step = (os.environ.get("PEER_FAULT") or "none:0:0").split(":")
        if kind == "none":
            return
        with self.out.with_suffix(f".beat{self.rank}").open("a") as f:
            f.write(f"{time.time()} {done} {os.getpid()}\n")
        flag = self.out.with_suffix(".fault")
        if int(rank) == self.rank and int(step) == done and not flag.exists():
            flag.write_text(str(time.time()))
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(STUCK_S)

    def _gate(self, done: int) -> None:
        if "PEER_GATE" not in os.environ or done >= self.steps:
            return
        warm, turn = (int(x) for x in os.environ["PEER_TURNS"].split(":"))
        if done < warm or (done - warm) % turn:
            return
        gate = pathlib.Path(os.environ["PEER_GATE"])
        (gate / f"rank{self.rank}.{done}").touch()
        if self._fifo is None:
            self._fifo = _open_fifo(gate / f"rank{self.rank}.fifo")
        if not self._fifo.read(1):
            raise SystemExit("the benchmark that would let this run on is gone")

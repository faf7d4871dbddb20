"""Ten ways in which ranks fail to come together, in plain torch.distributed: what each rank's user gets to read.

    python benchmarks/comm/by_hand.py [KIND ...]        3 ranks of gloo on this machine; about five minutes

Rank 1 is the odd one; the limit of the process group is 10 s. `evenly`'s words for the same ten are asserted by
tests/launcher/test_watch.py, and docs/talking.md shows both. A rank that still runs LIMIT_S after the first has ended
is reported as such and ended. Kept in benchmarks/results/by_hand.json.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RESULTS = Path(__file__).parents[1] / "results" / "by_hand.json"
RANKS, ODD = 3, 1
GROUP_TIMEOUT_S = 10
LIMIT_S = 40


# ------------------------------------------------------------------------------------------------- the ten
def missing(odd: bool) -> None:
    if odd:
        time.sleep(600)
    dist.all_reduce(torch.ones(4))


def shape(odd: bool) -> None:
    dist.all_reduce(torch.ones(5 if odd else 4000))


def dtype(odd: bool) -> None:
    dist.all_reduce(torch.ones(4000, dtype=torch.float64 if odd else torch.float32))


def operation(odd: bool) -> None:
    if odd:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4))


def order(odd: bool) -> None:
    def summed() -> None:
        dist.all_reduce(torch.ones(4000))

    def sent() -> None:
        dist.broadcast(torch.ones(70000), 0)

    for act in (sent, summed) if odd else (summed, sent):
        act()


def dead(odd: bool) -> None:
    if odd:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


class Lines(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, odd: bool) -> None:
        self.odd = odd

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.odd and index == 2:
            time.sleep(600)
        return torch.ones(3)


def stuck_loader(odd: bool) -> None:
    for batch in torch.utils.data.DataLoader(Lines(odd), num_workers=1):
        dist.all_reduce(batch)


def raised(odd: bool) -> None:
    if odd:
        raise ValueError("no such label")
    dist.all_reduce(torch.ones(4))


def slow(odd: bool) -> None:
    for _ in range(100000):
        if odd:
            until = time.monotonic() + 30
            while time.monotonic() < until:
                pass
        dist.all_reduce(torch.ones(4))


def microbatches(odd: bool) -> None:
    for _ in range(2 if odd else 3):
        dist.all_reduce(torch.ones(4))


KINDS: dict[str, Callable[[bool], None]] = {
    "missing": missing,
    "shape": shape,
    "dtype": dtype,
    "operation": operation,
    "order": order,
    "dead": dead,
    "stuck loader": stuck_loader,
    "raised": raised,
    "slow": slow,
    "microbatches": microbatches,
}


# ------------------------------------------------------------------------------------------------- running them
def rank_main(kind: str, rank: int, port: int) -> None:
    # A store of its own: to start takes longer than the limit of an operation.
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0, timeout=timedelta(seconds=300))
    limit = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    print("BEGINS", flush=True)
    KINDS[kind](rank == ODD)
    dist.destroy_process_group()


def tried(kind: str) -> dict[str, object]:
    """How each rank ended, when (s after the first had begun), and the last line it wrote."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", kind, str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(RANKS)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        rank.stdout.readline()  # BEGINS, or the error of the start
    began_s, ended_s = time.monotonic(), {}
    while len(ended_s) < RANKS and time.monotonic() < began_s + LIMIT_S:
        time.sleep(0.05)
        now_s = time.monotonic()
        ended_s |= {r: now_s - began_s for r, rank in enumerate(ranks) if r not in ended_s and rank.poll() is not None}
    outcomes = {}
    for number, rank in enumerate(ranks):
        code = rank.poll()
        try:
            os.killpg(rank.pid, signal.SIGKILL)  # data workers too
        except ProcessLookupError:
            pass
        output = rank.communicate()[0]
        outcomes[f"rank {number}"] = {
            "ended_s": round(ended_s[number], 1) if number in ended_s else None,
            "exit_code": code,
            "last_line": last_line(output),
        }
    return outcomes


def last_line(output: str) -> str:
    """The last line that says what happened."""
    lines = [line for line in output.splitlines() if re.match(r"\S*(Error|Exception|terminate|  what)", line.strip())]
    line = (lines or output.splitlines() or [""])[-1].strip()
    return re.sub(r"^\[.*?\.cc:\d+\] ?|\S*/(?=\w+\.cc)", "", line)[:200]


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    found = json.loads(RESULTS.read_text())["kinds"] if sys.argv[1:] and RESULTS.exists() else {}
    for kind in sys.argv[1:] or KINDS:
        found[kind] = tried(kind)
        print(kind, json.dumps(found[kind], indent=1), flush=True)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "ranks": RANKS, "backend": "gloo"}
    result = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "machine": machine, "group_timeout_s": GROUP_TIMEOUT_S}
    RESULTS.write_text(json.dumps({**result, "kinds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

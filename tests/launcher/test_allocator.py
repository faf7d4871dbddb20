"""Freed memory stays with the process, where the C library can be told so."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from math import inf

import pytest
from jobs import tower_job

import evenly
from evenly.launcher.allocator import FreedMemory, cgroup_limit_bytes, free_memory_bytes

PROGRAM = """
import resource, torch
from evenly.launcher.allocator import hand_back_freed_memory, keep_freed_memory
def step():
    tensors = [torch.ones(2_000_000) for _ in range(20)]
def faults():
    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
assert hand_back_freed_memory()  # left to itself glibc does so, or not, by what happens to lie behind
given_back = faults()
assert keep_freed_memory()
print(given_back, faults())
"""
LARGE = """
import resource, sys, torch
from evenly.launcher.allocator import FreedMemory, keep_freed_memory
def faults():
    for _ in range(20):
        torch.ones(10_000_000)  # 40 MB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(10_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
assert keep_freed_memory()
print(faults())
blocks = FreedMemory(ranks=2)
for peak in (10, 50, 100, 101):
    blocks.after_step(peak, lambda: int(sys.argv[1]))
    print(int(blocks.active), faults())
"""
HALF = """
import resource, torch
from evenly.launcher.allocator import hand_back_freed_memory
assert hand_back_freed_memory()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
torch.ones(1)
before = resident()
pieces = [torch.ones(500_000) for _ in range(40)]  # 2 MB each
pieces = pieces[::2]
print((resident() - before) / 40e6)
"""
RETURNED = """
import resource, torch
from evenly.launcher.allocator import keep_freed_memory, resident_bytes, return_freed_memory
assert keep_freed_memory()
pieces = [torch.ones(250_000) for _ in range(100)]  # 1 MB each
pieces = pieces[1::2]
held = resident_bytes()
assert return_freed_memory()
print((held - resident_bytes()) / 50e6, sum(float(piece.sum()) for piece in pieces))
"""

LENGTHS = """
import ctypes, torch, evenly
from torch import nn
def loss(model, batch):
    return evenly.Loss(model(batch).square().mean(), 1)
def job():
    return evenly.Job(
        model=lambda: nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(48, 48), nn.GELU())]), loss=loss,
        data=[torch.randn(16 + 3 * index, 48) for index in range(300)], collate=lambda samples: samples[0],
        optimizer=torch.optim.SGD, cost=lambda index: 16 + 3 * index, global_batch=1, microbatch=1, steps=300,
    )
class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "a free_chunks b c d e f used g h".split()]
heap = ctypes.CDLL(None).mallinfo2
heap.restype = Heap
with evenly.start(job(), plan="single") as run:
    for batch in run.batches():
        run.step(batch)
        if run.steps_done in (40, 300):
            print(heap().free_chunks)
"""


def printed(program: str, *arguments: str, **variables: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True, text=True, check=True, timeout=600, env={**os.environ, **variables},
    )  # fmt: skip
    return [float(word) for word in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_a_step_that_needs_what_the_one_before_freed_takes_no_page_faults() -> None:
    given_back, kept = printed(PROGRAM)
    assert kept < given_back / 10


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_large_blocks_are_kept_from_the_second_step_on_until_a_rank_holds_twice_as_much() -> None:
    before, *after = printed(LARGE, "200")
    assert after[::2] == [0, 1, 1, 0]
    assert max(after[3], after[5]) < min(before, after[1]) / 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_large_blocks_are_not_kept_where_memory_is_scarce() -> None:
    before, *after = printed(LARGE, "199")
    assert after[::2] == [0] * 4
    assert after[1::2] == pytest.approx([before] * 4, rel=0.2)


def test_free_memory_is_that_of_the_control_group_where_it_has_less() -> None:
    assert 0 < free_memory_bytes() <= (cgroup_limit_bytes() or inf)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked")
def test_samples_of_many_lengths_do_not_leave_the_heap_in_pieces() -> None:
    early, late = printed(LENGTHS, ONEDNN_PRIMITIVE_CACHE_CAPACITY="1024")
    if late < 2 * early:
        pytest.skip("this processor's functions are not oneDNN's")
    few_early, few_late = printed(LENGTHS)
    assert few_late - few_early < (late - early) / 5


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_what_is_freed_between_others_goes_back_to_the_system() -> None:
    (taken,) = printed(HALF)
    assert 0.9 < taken < 1.2  # of what the pieces that are left hold


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked")
def test_what_was_freed_between_others_can_be_returned() -> None:
    returned, whole = printed(RETURNED)
    assert 0.8 < returned < 1.2 and whole == 50 * 250_000


def test_freed_memory_is_returned_where_a_rank_has_grown_since_its_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    held, returned = iter((70, 80, 100, 103, 104, 105, 99, 103, 120)), list[int]()
    memory = FreedMemory(ranks=1)
    monkeypatch.setattr(f"{FreedMemory.__module__}.resident_bytes", lambda: next(held))
    monkeypatch.setattr(f"{FreedMemory.__module__}.return_freed_memory", lambda: returned.append(len(told)))
    told = list[int]()
    while len(told) < 360:
        told.append(1)
        memory.after_step(1, lambda: 0)
    assert returned == [200, 240, 360] and next(held, None) is None


def test_a_run_tells_after_every_step_what_a_rank_has_held(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(FreedMemory, "after_step", lambda self, peak_bytes, free_bytes: told.append(peak_bytes))
    with evenly.start(tower_job(steps=3), plan="single") as run:
        for batch in run.batches():
            run.step(batch)
    assert len(told) == 3
    assert min(told) > 10_000_000  # an interpreter with torch in it

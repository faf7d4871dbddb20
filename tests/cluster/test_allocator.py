"""Freed memory stays with the process, where the C library can be told so."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from evenly.cluster.allocator import hand_back_freed_memory, keep_freed_memory
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
HALF = """
import resource, torch
from evenly.cluster.allocator import hand_back_freed_memory
assert hand_back_freed_memory()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
torch.ones(1)
before = resident()
pieces = [torch.ones(500_000) for _ in range(40)]  # 2 MB each
pieces = pieces[::2]
print((resident() - before) / 40e6)
"""


def printed(program: str) -> list[float]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600)
    return [float(word) for word in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_a_step_that_needs_what_the_one_before_freed_takes_no_page_faults() -> None:
    given_back, kept = printed(PROGRAM)
    assert kept < given_back / 10


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_what_is_freed_between_others_goes_back_to_the_system() -> None:
    (taken,) = printed(HALF)
    assert 0.9 < taken < 1.2  # of what the pieces that are left hold

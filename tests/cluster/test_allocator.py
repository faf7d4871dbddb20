"""Freed memory stays with the process, where the C library can be told so."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from evenly.cluster.allocator import keep_freed_memory
def step():
    tensors = [torch.ones(2_000_000) for _ in range(20)]
def faults():
    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
given_back = faults()
assert keep_freed_memory()
print(given_back, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_a_step_that_needs_what_the_one_before_freed_takes_no_page_faults() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=600)
    given_back, kept = map(int, done.stdout.split())
    assert kept < given_back / 10

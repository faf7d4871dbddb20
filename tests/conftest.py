"""Fixtures of all tests; every test leaves no process, thread count or environment variable behind."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for kept_ranks and jobs
os.environ.setdefault("OMP_NUM_THREADS", "1")

from kept_ranks import ALLOCATIONS, KeptRanks

import evenly.launcher.no_collection  # noqa: F401  until all tests are imported
from evenly.launcher.frozen import freeze_imports

# How fast examples come says how busy the machine is.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

_cache = tempfile.TemporaryDirectory(prefix="evenly-cache-")  # gone with this process
os.environ["XDG_CACHE_HOME"] = _cache.name


# The files that take longest, or have tests that do: begun first, so that none is left to one worker at the end.
LONG = (
    "faults/test_campaign",
    "parallel/test_pipeline",
    "wrong_runs/test_wrong_runs",
    "cli/test_nodes_command",
    "checkpoint/test_across_plans",
    "parallel/test_tensor",
    "launcher/test_torchrun",
    "parallel/test_compiled",
    "parallel/test_stages",
    "launcher/test_launch",
    "verify/test_faults",
    "parallel/test_exact_sums",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a case of a test with `full_but` as `full`, unless its id fits one of the patterns."""
    mark = item.get_closest_marker("full_but")
    if mark is not None and not any(fnmatchcase(_case(item), pattern) for pattern in mark.args):
        item.add_marker("full")


def _case(item: pytest.Item) -> str:
    return item.name.partition("[")[2].removesuffix("]")


@pytest.hookimpl(tryfirst=True)  # before those marked `full` are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in argument for argument in config.args):  # else not all cases of a test are here
        _check_patterns(items)
    here, places = Path(__file__).parent, {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(str(item.path.relative_to(here).with_suffix("")), len(LONG)))


def _check_patterns(items: list[pytest.Item]) -> None:
    """Raise `UsageError` for a pattern of `full_but` that fits no case: `make test` would have lost one in silence."""
    cases: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for item in items:
        if (mark := item.get_closest_marker("full_but")) is not None:
            cases.setdefault((item.nodeid.partition("[")[0], mark.args), []).append(_case(item))
    for (test, patterns), found in cases.items():
        for pattern in patterns:
            if not any(fnmatchcase(case, pattern) for case in found):
                raise pytest.UsageError(f"{test}: no case fits {pattern!r} of full_but; there are {', '.join(found)}")


def pytest_collection_finish() -> None:
    freeze_imports()
    gc.enable()
    gc.set_threshold(ALLOCATIONS, 50, 100)


@pytest.fixture(scope="session")
def ranks() -> Iterator[KeptRanks]:
    """Kept ranks, shared by all tests."""
    kept = KeptRanks()
    yield kept
    kept.close()


@pytest.fixture(autouse=True)
def _small_blocks_are_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """As kept ranks have it: the blocks of small models are units of zero=3, cut as those of large ones are."""
    monkeypatch.setattr("evenly.parallel.data.grouping.SMALL_BYTES", 0)
    monkeypatch.setattr("evenly.parallel.data.grouping.WHOLE_BYTES", 0)


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    changed = {k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)}
    # Set by pytest and by torch themselves, by a run for oneDNN, and by scikit-learn when it is first imported.
    changed -= {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"}
    changed -= {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
    assert not changed, f"the test left environment variables changed: {changed}"

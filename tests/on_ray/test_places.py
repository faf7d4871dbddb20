"""The place of workers among the ranks, what they have to have in common, and how their failures are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenly.errors import UserError
from evenly.launcher.rank import Kind, RankExit
from evenly.ray.failures import FailedWorker, first_failure
from evenly.ray.places import WorkerFacts, check_workers, places_of

VERSIONS = {"evenly": "0.1.0", "torch": "2.13.0"}


def worker(rank: int, local_rank: int, local_size: int, node: int, **others: object) -> WorkerFacts:
    facts = {"address": f"10.0.0.{node + 1}", "port": 4000 + rank, "versions": VERSIONS, **others}
    return WorkerFacts(rank=rank, local_rank=local_rank, local_size=local_size, node=node, **facts)  # type: ignore[arg-type]


def test_all_meet_where_rank_0_is() -> None:
    """Nodes with different numbers of workers, which Ray names in another order than their ranks'."""
    places = places_of([worker(2, 0, 1, 1), worker(0, 0, 2, 0), worker(1, 1, 2, 0)])
    assert [(p.rank, p.local_rank, p.local_size, p.node) for p in places] == [(2, 0, 1, 1), (0, 0, 2, 0), (1, 1, 2, 0)]
    assert {(p.size, p.nodes, p.address, p.port, p.launcher) for p in places} == {(3, 2, "10.0.0.1", 4000, "ray")}


def test_workers_that_can_be_ranks_of_one_run() -> None:
    check_workers([worker(0, 0, 1, 0), worker(1, 0, 1, 1)], Path("/runs/mine"))


def test_versions_that_differ_are_named_with_their_nodes() -> None:
    old = {**VERSIONS, "evenly": "0.0.9"}
    with pytest.raises(UserError) as refused:
        check_workers([worker(0, 0, 2, 0), worker(1, 1, 2, 0), worker(2, 0, 1, 1, versions=old)], Path("/runs/mine"))
    assert refused.value.found == "evenly is 0.0.9 on 10.0.0.2; 0.1.0 on 10.0.0.1"


def test_a_folder_that_is_not_shared() -> None:
    with pytest.raises(UserError) as refused:
        check_workers([worker(0, 0, 1, 0), worker(1, 0, 1, 1, sees_folder=False)], Path("/runs/mine"))
    assert "/runs/mine" in refused.value.asked and "10.0.0.2 does not see" in refused.value.found


def failed(rank: int, kind: Kind, time_s: float, **others: object) -> FailedWorker:
    return FailedWorker(RankExit(rank=rank, time_s=time_s, kind=kind, **{"found": f"{kind} it was", **others}))  # type: ignore[arg-type]


GONE = RuntimeError("A worker health check failed.\n  node_ip='10.0.0.2',\nThe actor died unexpectedly")


def test_the_cause_is_the_rank_that_did_not_lose_another() -> None:
    found = first_failure({0: failed(0, "peer", 1.0), 2: failed(2, "error", 2.0, step=7, found="ValueError: no")})
    assert (found.asked, found.found, found.rank, found.step) == ("rank 2 failed at step 7", "ValueError: no", 2, 7)
    lost = first_failure({0: failed(0, "peer", 1.0), 1: GONE})
    assert (lost.rank, lost.kind, lost.found) == (1, "killed", "its worker on 10.0.0.2 is gone, perhaps with its node")
    nobody = first_failure({0: failed(0, "peer", 1.0), 1: failed(1, "peer", 2.0)})
    assert nobody.asked == "the ranks lost one of them" and nobody.exit_code == 1


def test_a_mistake_is_said_as_it_was_found() -> None:
    found = first_failure(
        {1: failed(1, "error", 1.0, asked="plan zero=9", found="there is none", do="0 to 3", exit_code=2)}
    )
    assert (found.asked, found.found, found.do, found.exit_code) == ("plan zero=9", "there is none", "0 to 3", 2)


def test_a_worker_that_ray_has_killed_for_want_of_memory() -> None:
    found = first_failure({3: RuntimeError("Task was killed due to the node running low on memory.")})
    assert (found.kind, found.rank) == ("memory", 3)

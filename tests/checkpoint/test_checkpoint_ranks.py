from __future__ import annotations

import errno
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_ranks import in_group
from kept_ranks import KeptRanks, RankFailure
from torch import Tensor, nn, optim

from evenly.checkpoint.state import read_state, restore
from evenly.checkpoint.store import CheckpointStore, Snapshot
from evenly.comm.groups import Group
from evenly.errors import CheckpointError, UserError, rank_of


def state_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    sizes = {"a": (64, 8), "b": (31,), "c": (5, 6, 7), "d": (200,)}
    tensors = {f"model.{name}": torch.randn(size, generator=generator) for name, size in sizes.items()}
    return {**tensors, "optimizer.a.step": torch.tensor(float(step)), "model.none": torch.empty(0, 3)}


def wrong_names(found: dict[str, Tensor], step: int) -> list[str]:
    return [name for name, tensor in state_of(step).items() if not torch.equal(found[name], tensor)]


def save_steps(group: Any, rank: int, folder: Path, steps: list[int]) -> list[int]:
    store = CheckpointStore(folder, group)
    for step in steps:
        store.save(Snapshot(step, state_of(step), {"seed": 3}))
        work = dist.all_reduce(torch.ones(1000), async_op=True)  # training's own, while the save goes on
        work.wait()
    store.close()
    return store.steps()


def load_step(group: Any, rank: int, folder: Path) -> tuple[int, dict[str, Any], list[str]]:
    store = CheckpointStore(folder, group)
    checkpoint = store.load()
    into = {name: torch.full_like(tensor, -1) for name, tensor in state_of(1).items()}
    checkpoint.read(into)
    store.close()
    return checkpoint.step, checkpoint.values, wrong_names(into, checkpoint.step)


def test_saved_by_two_ranks_loaded_by_any_number(ranks: KeptRanks, tmp_path: Path) -> None:
    assert ranks.run(in_group, save_steps, tmp_path, [1, 2, 3, 4], size=2) == [[2, 3, 4], [2, 3, 4]]
    files = sorted((tmp_path / "checkpoints" / "step-00000004").glob("*.safetensors"))
    assert len(files) == 2
    stored, whole = sum(f.stat().st_size for f in files), sum(t.nbytes for t in state_of(1).values())
    assert whole < stored < 2 * whole + 2000 and min(f.stat().st_size for f in files) > 300  # once, by both
    assert load_step(None, 0, tmp_path) == (4, {"seed": 3}, [])
    assert ranks.run(in_group, load_step, tmp_path, size=3) == [(4, {"seed": 3}, [])] * 3


def test_saved_by_one_process_loaded_by_two_ranks(ranks: KeptRanks, tmp_path: Path) -> None:
    save_alone(tmp_path, 7)
    assert ranks.run(in_group, load_step, tmp_path, size=2) == [(7, {"seed": 3}, [])] * 2


def save_alone(folder: Path, step: int) -> None:
    store = CheckpointStore(folder)
    store.save(Snapshot(step, state_of(step), {"seed": 3}))
    store.close()


def sharded(group: Any, rank: int, folder: Path, do: str) -> list[bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = {
        "rows": torch.arange(35.0).reshape(7, 5),
        "columns": torch.arange(24.0).reshape(2, 12),
        "both": torch.ones(3),
    }
    places = {"rows": Shard(0), "columns": Shard(1), "both": Replicate()}
    values = whole if do == "save" else {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    tensors: dict[str, Tensor] = {n: distribute_tensor(t, mesh, [places[n]]) for n, t in values.items()}
    store = CheckpointStore(folder, group)
    if do == "save":
        store.save(Snapshot(1, tensors, {}))
        for tensor in tensors.values():
            tensor.mul_(9)
    else:
        store.load().read(tensors)
    store.close()
    return [torch.equal(tensors[n].full_tensor(), whole[n]) for n in whole]


def test_shards_go_through_the_same_path_and_are_cut_anew(ranks: KeptRanks, tmp_path: Path) -> None:
    ranks.run(in_group, sharded, tmp_path, "save", size=2)
    into = {"rows": torch.zeros(7, 5), "columns": torch.zeros(2, 12), "both": torch.zeros(3)}
    store = CheckpointStore(tmp_path)
    store.load().read(into)
    assert torch.equal(into["rows"], torch.arange(35.0).reshape(7, 5))
    assert torch.equal(into["columns"], torch.arange(24.0).reshape(2, 12)) and into["both"].eq(1).all()
    assert ranks.run(in_group, sharded, tmp_path, "load", size=3) == [[True] * 3] * 3


def parts(group: Any, rank: int, folder: Path, do: str) -> list[float]:
    """Every rank has a layer of its own, as the stages of a pipeline do."""
    torch.manual_seed(rank)
    model = nn.ModuleDict({f"layer{rank}": nn.Linear(2, 2)})
    optimizer = optim.AdamW(model.parameters(), lr=0.1 * (rank + 1))
    model[f"layer{rank}"](torch.ones(1, 2)).sum().backward()
    store = CheckpointStore(folder, group)
    if do == "save":
        optimizer.step()
        store.save(Snapshot(1, *read_state(model, optimizer)))
    else:
        restore(store.load(), model, optimizer)
    store.close()
    return [p.sum().item() for p in model.parameters()] + [s["exp_avg"].sum().item() for s in optimizer.state.values()]


def test_ranks_may_hold_parts_of_the_model(ranks: KeptRanks, tmp_path: Path) -> None:
    saved = ranks.run(in_group, parts, tmp_path, "save", size=2)
    assert ranks.run(in_group, parts, tmp_path, "load", size=2) == saved and saved[0] != saved[1]
    model = nn.ModuleDict({f"layer{rank}": nn.Linear(2, 2) for rank in range(2)})
    groups = [{"params": list(model[f"layer{rank}"].parameters()), "lr": 1.0} for rank in range(2)]
    optimizer = optim.AdamW(groups)
    restore(CheckpointStore(tmp_path).load(), model, optimizer)
    assert [p.sum().item() for p in model.parameters()] == saved[0][:2] + saved[1][:2]
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.2]


def raised(act: Any) -> str:
    try:
        act()
    except CheckpointError as error:
        return f"{error} (of rank {rank_of(error)})"
    return "nothing raised"


def fail_on_rank_1(group: Any, rank: int, folder: Path) -> tuple[list[str], list[int], list[int]]:
    """The kernel refuses rank 1 files of more than 1 KiB during the second save."""
    store = CheckpointStore(folder, group)
    store.save(Snapshot(1, state_of(1), {}))
    store.finish()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, limits[1]))
    store.save(Snapshot(2, state_of(2), {}))
    errors = [raised(store.finish), raised(store.finish)]
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    after_failure = store.steps()
    store.save(Snapshot(3, state_of(3), {}))
    store.close()
    return errors, after_failure, store.steps()


def test_a_failure_of_one_rank_is_raised_on_all_and_loses_nothing(ranks: KeptRanks, tmp_path: Path) -> None:
    results = ranks.run(in_group, fail_on_rank_1, tmp_path, size=2)
    assert results[0] == results[1]
    (first, second), after_failure, after_next = results[0]
    assert "of rank 1" in first and os.strerror(errno.EFBIG) in first and second == "nothing raised"
    assert (after_failure, after_next) == ([1], [1, 3])
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [".lock", "step-00000001", "step-00000003"]


def load_error(group: Any, rank: int, folder: Path, step: int) -> str:
    return raised(lambda: CheckpointStore(folder, group).load(step))


def test_all_ranks_refuse_what_one_rank_finds_altered(ranks: KeptRanks, tmp_path: Path) -> None:
    ranks.run(in_group, save_steps, tmp_path, [1, 2], size=2)
    file = sorted((tmp_path / "checkpoints" / "step-00000002").glob("*.safetensors"))[1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    errors = ranks.run(in_group, load_error, tmp_path, 2, size=2)
    assert errors[0] == errors[1] and "was altered" in errors[0] and "resume from step 1" in errors[0]
    passed = ranks.run(in_group, loaded_step, tmp_path, size=2)
    assert passed[0] == passed[1] and passed[0][0] == 1 and "step 2 is not sound" in passed[0][1]


def loaded_step(group: Any, rank: int, folder: Path) -> tuple[int, str]:
    store = CheckpointStore(folder, group)
    return store.load().step, store.passed_over


def disagree(group: Any, rank: int, folder: Path) -> str:
    store = CheckpointStore(folder, group)
    store.save(Snapshot(1, state_of(1), {"seed": rank}))
    return raised(store.finish)


def test_ranks_with_other_values_are_told(ranks: KeptRanks, tmp_path: Path) -> None:
    errors = ranks.run(in_group, disagree, tmp_path, size=2)
    assert errors[0] == errors[1] and "disagree about values.seed" in errors[0]
    assert CheckpointStore(tmp_path).steps() == []


def without_own_group(group: Any, rank: int, folder: Path) -> list[str]:
    found = []
    for given in (None, Group.world()):
        try:
            CheckpointStore(folder, given)
        except UserError as error:
            found.append(error.found)
    return found


def test_ranks_need_a_group_that_nothing_else_uses(ranks: KeptRanks, tmp_path: Path) -> None:
    assert (
        ranks.run(in_group, without_own_group, tmp_path, size=2)
        == [["2 ranks but a group of 1", "the default group"]] * 2
    )


def die_while_saving(group: Any, rank: int, folder: Path) -> None:
    from evenly.checkpoint import tensors

    store = CheckpointStore(folder, group)
    store.save(Snapshot(1, state_of(1), {}))
    store.finish()
    tensors.write_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    store.save(Snapshot(2, state_of(2), {}))
    threading.Event().wait(30)


def test_a_run_killed_while_saving_leaves_the_older_checkpoint_and_the_next_cleans_up(
    ranks: KeptRanks, tmp_path: Path
) -> None:
    with pytest.raises(RankFailure, match="the process ended"):
        ranks.run(in_group, die_while_saving, tmp_path, size=2)
    partial = tmp_path / "checkpoints" / ".partial-step-00000002"
    assert partial.is_dir() and CheckpointStore(tmp_path).steps() == [1]
    assert load_step(None, 0, tmp_path) == (1, {}, [])
    save_alone(tmp_path, 3)
    assert not partial.exists() and CheckpointStore(tmp_path).steps() == [1, 3]

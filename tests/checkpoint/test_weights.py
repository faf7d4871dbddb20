"""Pretrained weights: what is refused, and the bits that every plan starts from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Points, class_loss
from jobs_pipeline import Tied, text_job
from kept_ranks import KeptRanks
from safetensors.torch import save_file
from torch import nn

import evenly
from evenly.checkpoint.weights import check_weights, find_weights
from evenly.errors import UserError
from evenly.parallel.core import sharded_init
from evenly.verify.reference import build_model


class Small(nn.Module):
    """Odd shapes, a tie, and buffers, one of which is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3)
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


class Wrapping(nn.Module):
    """Holds another model, as a user's module does."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *given: Any) -> Any:
        return self.net(*given)


def state(model: nn.Module, seed: int = 3) -> dict[str, torch.Tensor]:
    """Other values for the model's state, of its shapes and types; of ties the first name."""
    draw = torch.Generator().manual_seed(seed)
    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    return {
        name: torch.rand(one.shape, generator=draw).to(one.dtype)
        if one.is_floating_point()
        else torch.full_like(one, 11)
        for name, one in model.state_dict().items()
        if name in names
    }


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], *, files: int = 2) -> Path:
    """As save_pretrained names them."""
    folder.mkdir()
    names = [*tensors]
    places = {name: f"model-{1 + i % files:05d}-of-{files:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def small_job(weights: Path | str | None, **changes: Any) -> evenly.Job:
    fields: dict[str, Any] = dict(
        model=Small, loss=class_loss, data=Points(12), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), global_batch=4,
        microbatch=2, steps=2, weights=weights,
    )  # fmt: skip
    return evenly.Job(**{**fields, **changes})


def tied_job(**changes: Any) -> evenly.Job:
    return text_job(**{"model": Tied, **changes})


def started(job: Callable[..., evenly.Job], weights: Path, plan: str, **changes: Any) -> dict[str, torch.Tensor]:
    """On a rank, all that it has of the model as a run starts, whole; storages of 64 bytes are large ones."""
    least, sharded_init.LEAST_BYTES = sharded_init.LEAST_BYTES, 64
    try:
        with evenly.start(job(weights=weights, **changes), plan=plan) as run, run.inside():
            named = [*run.model.named_parameters(), *run.model.named_buffers()]
            return {name: run.composed.full_view(name, one.detach()).clone() for name, one in named if not one.is_meta}
    finally:
        sharded_init.LEAST_BYTES = least


def assert_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


PLANS = (("ddp", 2), ("zero2", 2), ("zero3", 2), ("tensor=2", 2), ("pipeline=2", 2), ("data=2 tensor=2 zero=3", 4))


@pytest.mark.full_but("ddp", "zero3", "tensor=2", "pipeline=2")
@pytest.mark.parametrize(("plan", "size"), PLANS, ids=[plan for plan, _ in PLANS])
def test_every_plan_starts_from_the_bits_of_the_files(plan: str, size: int, ranks: KeptRanks, tmp_path: Path) -> None:
    expected = state(Tied())
    folder = write_shards(tmp_path / "weights", expected, files=3)
    found = ranks.run(started, tied_job, folder, plan, size=size)
    for of_rank in found:
        assert_bits(of_rank, {name: expected[name] for name in of_rank})
    assert set().union(*found) == expected.keys()


@pytest.mark.full_but("zero3")
@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_types_are_converted_and_buffers_are_read(plan: str, ranks: KeptRanks, tmp_path: Path) -> None:
    values = state(Small())
    narrow = {name: one.bfloat16() if one.is_floating_point() else one for name, one in values.items()}
    save_file(narrow, tmp_path / "small.safetensors")
    for of_rank in ranks.run(started, wrapped_job, tmp_path / "small.safetensors", plan):
        assert_bits(of_rank, {f"net.{name}": one.to(values[name].dtype) for name, one in narrow.items()})


def wrapped_job(**changes: Any) -> evenly.Job:
    return small_job(model=lambda: Wrapping(Small()), **changes)


def test_float64_weights_keep_their_digits(tmp_path: Path) -> None:
    values = {name: one.double() / 3 if one.is_floating_point() else one for name, one in state(Small()).items()}
    save_file(values, tmp_path / "small.safetensors")
    assert_bits(started(small_job, tmp_path / "small.safetensors", "single", precision="float64"), values)
    reference = build_model(small_job(tmp_path / "small.safetensors", precision="float64"))
    assert_bits(reference.state_dict(), values)


def test_a_run_that_goes_on_does_not_read_them(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "weights", state(Small()))
    job = small_job(folder)
    with evenly.start(job, plan="single", out=tmp_path / "run", steps=1) as run:
        for batch in run.batches():
            run.step(batch)
        expected = {name: one.detach().clone() for name, one in run.model.state_dict().items()}
    for file in folder.iterdir():
        file.unlink()
    with evenly.start(job, plan="single", out=tmp_path / "run", resume=True) as run:
        assert_bits(run.model.state_dict(), expected)


def test_all_that_does_not_fit_is_listed_at_once(ranks: KeptRanks, tmp_path: Path) -> None:
    tensors = state(Small())
    del tensors["last.bias"], tensors["norm.weight"]
    tensors["first.weight"] = tensors["first.weight"].T.contiguous()
    tensors["first.bias"] = tensors["first.bias"].int()
    tensors["norm.num_batches_tracked"] = tensors["norm.num_batches_tracked"].int()
    tensors["more.weight"] = torch.ones(1)
    folder = write_shards(tmp_path / "weights", tensors)
    messages = ranks.run(refused, folder)
    assert messages[0] == messages[1]
    for phrase in (
        "norm.weight is missing",
        "last.bias is missing",
        "first.weight is float32[5, 7] in the file, float32[7, 5] in the model",
        "first.bias is of int32 in the file, of float32 in the model",
        "norm.num_batches_tracked is of int32 in the file, of int64 in the model",
        "more.weight is not in the model",
    ):
        assert phrase in messages[0]
    with pytest.raises(UserError, match=r"missing: norm.weight, last.bias; not in the model: more.weight"):
        build_model(small_job(write_shards(tmp_path / "fewer", {**state_without(), "more.weight": torch.ones(1)})))
    with torch.device("meta"), pytest.raises(UserError, match=r"last.bias is missing"):
        check_weights(folder, Small())


def state_without() -> dict[str, torch.Tensor]:
    return {name: one for name, one in state(Small()).items() if name not in ("norm.weight", "last.bias")}


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as raised:
        evenly.start(small_job(folder), plan="zero3")
    return str(raised.value)


def test_ranks_that_find_other_files_are_named(ranks: KeptRanks, tmp_path: Path) -> None:
    for number in range(2):
        write_shards(tmp_path / str(number), state(Small(), seed=number))
    assert all("rank 1 finds other files there than rank 0" in one for one in ranks.run(refused_elsewhere, tmp_path))


def refused_elsewhere(folder: Path) -> str:
    import os

    return refused(folder / os.environ["RANK"])


def test_tied_weights_may_be_there_twice_if_they_agree(tmp_path: Path) -> None:
    tensors = state(Tied())
    twice = {**tensors, "head.weight": tensors["embed.weight"].clone()}
    folder = write_shards(tmp_path / "twice", twice)
    assert_bits(started(tied_job, folder, "single"), tensors)
    other = write_shards(tmp_path / "other", {**twice, "head.weight": twice["head.weight"] + 1})
    with pytest.raises(UserError, match=r"embed.weight and head.weight differ, which the model has tied"):
        evenly.start(tied_job(weights=other), plan="single")
    alone = {name if name != "embed.weight" else "head.weight": one for name, one in tensors.items()}
    assert_bits(started(tied_job, write_shards(tmp_path / "alone", alone), "single"), tensors)


def test_pickles_are_refused(tmp_path: Path) -> None:
    torch.save(state(Small()), tmp_path / "model.bin")
    with pytest.raises(UserError, match=r"a pickle: convert it once"):
        small_job(tmp_path / "model.bin")
    with pytest.raises(UserError, match=r"it holds pickles alone \(model.bin\)"):
        find_weights(tmp_path)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("{", "malformed"),
        ("[]", "malformed"),
        ('{"weight_map": {"a": 1}}', "malformed"),
        ('{"weight_map": {}}', "names no tensor"),
        ('{"weight_map": {"w": "../w.safetensors"}}', r"names '\.\./w.safetensors'"),
        ('{"weight_map": {"w": "w.safetensors"}}', "header of w.safetensors is malformed"),
        ('{"weight_map": {"v": "v.safetensors"}}', "v is not in v.safetensors"),
    ],
)
def test_a_folder_that_is_not_sound_is_refused(index: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    save_file({"w": torch.ones(2)}, tmp_path / "v.safetensors")
    with pytest.raises(UserError, match=reason):
        find_weights(tmp_path)


def test_files_are_found(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        find_weights(tmp_path / "none")
    save_file({"w": torch.ones(2)}, tmp_path / "v.safetensors")
    assert [*find_weights(tmp_path)] == [*find_weights(tmp_path / "v.safetensors")] == ["w"]
    save_file({"w": torch.ones(2)}, tmp_path / "u.safetensors")
    with pytest.raises(UserError, match=r"2 files of safetensors and no model\.safetensors"):
        find_weights(tmp_path)
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    assert [*find_weights(tmp_path)] == ["x"]

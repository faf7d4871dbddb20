from __future__ import annotations

import errno
import json
import math
import pickle
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn, optim

from evenly.checkpoint import folder
from evenly.checkpoint import store as store_module
from evenly.checkpoint import tensors as tensors_module
from evenly.checkpoint.manifest import TensorForm
from evenly.checkpoint.state import read_state, restore
from evenly.checkpoint.store import CheckpointStore, Snapshot, deal_out
from evenly.checkpoint.tensors import file_numbers
from evenly.errors import CheckpointError, UserError

DTYPES = ["float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64"]
SHAPES: list[tuple[int, ...]] = [(3, 4), (), (0,), (2, 0, 3)]
VALUES = {"plan": "ddp", "seed": 3, "betas": (0.9, 0.95), "milestones": Counter({3: 2}), "scale": 65536.0, "x": None}


def odd_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = {
        f"{d}.{len(s)}.{i}": torch.randn(s).mul(50).to(getattr(torch, d)) for d in DTYPES for i, s in enumerate(SHAPES)
    }
    made["transposed"] = torch.randn(3, 4).t()
    made["channels_last"] = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    made["view"] = torch.randn(10)[2:5]
    made["nan"] = torch.tensor([float("nan"), float("inf"), -0.0])
    return made


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def blank(like: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, 1) for name, tensor in like.items()}


@contextmanager
def opened(folder: Path) -> Iterator[CheckpointStore]:
    store = CheckpointStore(folder)
    try:
        yield store
    finally:
        store.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    with opened(tmp_path) as made:
        yield made
    assert not [t for t in threading.enumerate() if t.name.startswith("evenly-checkpoint") and t.is_alive()]


def save(store: CheckpointStore, step: int, number: float = 1.0, score: float | None = None) -> None:
    store.save(Snapshot(step, {"model.w": torch.full((4,), number)}, {"step_s": number}), score=score)
    store.finish()


def loaded(store: CheckpointStore, step: int | None = None) -> Tensor:
    into = {"model.w": torch.zeros(4)}
    store.load(step).read(into)
    return into["model.w"]


def test_every_type_and_shape_and_value_comes_back_bit_by_bit(store: CheckpointStore, tmp_path: Path) -> None:
    tensors = odd_tensors()
    store.save(Snapshot(10, tensors, VALUES))
    store.finish()
    assert store.steps() == [10]
    with opened(tmp_path) as other:
        checkpoint = other.load()
        assert checkpoint.step == 10 and checkpoint.values == VALUES
        assert type(checkpoint.values["betas"]) is tuple and type(checkpoint.values["milestones"]) is Counter
        into = blank(tensors)
        checkpoint.read(into)
    for name, tensor in tensors.items():
        assert into[name].dtype == tensor.dtype and into[name].shape == tensor.shape
        assert bits(into[name]) == bits(tensor), name


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_state_that_must_be_finite_and_is_not_is_not_saved(number: float, store: CheckpointStore) -> None:
    save(store, 1, 7.0)
    save(store, 2, number)  # nobody has asked: a buffer, say
    bad = Snapshot(3, {"model.w": torch.tensor([1.0, number]), "mask": torch.tensor([-math.inf])}, {})
    store.save(replace(bad, finite=frozenset(["model.w"])))
    with pytest.raises(CheckpointError, match="parameter w is no finite number any more"):
        store.finish()
    assert store.steps() == [1, 2]
    large = torch.full((4,), torch.finfo(torch.float16).max, dtype=torch.float16)
    store.save(Snapshot(4, {"model.w": large}, {}, frozenset(["model.w"])))  # whose sum is beyond the type
    store.finish()
    assert store.steps() == [1, 2, 4]


def test_a_type_that_the_files_cannot_hold_is_an_error_and_leaves_nothing(store: CheckpointStore) -> None:
    save(store, 1)
    store.save(Snapshot(2, {"model.w": torch.ones(2, dtype=torch.complex128)}, {}))
    with pytest.raises(CheckpointError, match="complex128"):
        store.finish()
    assert visible(store) == ["step-00000001"]


def visible(store: CheckpointStore) -> list[str]:
    return sorted(p.name for p in store._folder.checkpoints.iterdir() if p.name != ".lock")


def test_nothing_is_unpickled(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1, 7.0)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    assert loaded(store).tolist() == [7.0] * 4
    assert {p.suffix for p in store._folder.path(1).iterdir()} == {".json", ".safetensors"}


@contextmanager
def slow_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Files are written only after the event is set."""
    go_on = threading.Event()
    real = tensors_module.save_tensors

    def late(*args: Any) -> Any:
        assert go_on.wait(300)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "save_tensors", late)
        try:
            yield go_on
        finally:
            go_on.set()


def test_changes_after_save_returned_do_not_reach_the_file(store: CheckpointStore, monkeypatch: Any) -> None:
    weight = torch.ones(1000)
    with slow_files(monkeypatch) as go_on:
        store.save(Snapshot(1, {"w": weight, "alias": weight[:10]}, {}))
        weight.mul_(5)
        assert store.steps() == []
        go_on.set()
        store.finish()
    into = {"w": torch.zeros(1000), "alias": torch.zeros(10)}
    store.load().read(into)
    assert into["w"].eq(1).all() and into["alias"].eq(1).all()


def test_only_one_save_is_under_way_and_its_memory_is_used_again(store: CheckpointStore, monkeypatch: Any) -> None:
    tensors = {"w": torch.ones(100)}
    staged: list[int] = []
    real = store._stage

    def stage(given: Any) -> Any:
        result = real(given)
        staged.append(result["w"].data_ptr())
        assert len(staged) == 1 or store.steps() == [1]  # the first is complete before its memory is used
        return result

    monkeypatch.setattr(store, "_stage", stage)
    with slow_files(monkeypatch) as go_on:
        threading.Timer(0.2, go_on.set).start()
        begun = time.monotonic()
        store.save(Snapshot(1, tensors, {}))
        tensors["w"].mul_(2)
        store.save(Snapshot(2, tensors, {}))
        assert time.monotonic() - begun > 0.15
        store.finish()
    assert staged[0] == staged[1] != tensors["w"].data_ptr()
    for step, number in ((1, 1.0), (2, 2.0)):
        into = {"w": torch.zeros(100)}
        store.load(step).read(into)
        assert into["w"].eq(number).all()


def test_the_newest_and_the_best_stay(store: CheckpointStore) -> None:
    for step, score in enumerate([3.0, 1.0, 2.0, float("nan"), None, 5.0]):
        save(store, step, score=score)
    assert store.steps() == [1, 3, 4, 5]
    assert json.loads((store._folder.path(3) / "manifest.json").read_text())["score"] is None


def full_disk(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("place", ["tensors", "manifest", "folder"])
def test_a_full_disk_loses_no_checkpoint_and_is_said_at_the_next_call(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    save(store, 1)
    with monkeypatch.context() as patch:
        if place == "tensors":
            patch.setattr("os.fsync", full_disk)
        elif place == "manifest":
            patch.setattr("evenly.checkpoint.folder._write_synced", full_disk)
        else:
            patch.setattr("pathlib.Path.mkdir", full_disk)
        store.save(Snapshot(2, {"model.w": torch.zeros(1 << 20)}, {}))
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            store.finish()
    assert "step 2" in caught.value.asked and "free space" in caught.value.do
    assert visible(store) == ["step-00000001"]
    store.finish()  # said once
    save(store, 3)
    assert visible(store) == ["step-00000001", "step-00000003"]


def test_a_failed_save_is_said_by_the_next_save_before_it_begins(store: CheckpointStore, monkeypatch: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full_disk)
        store.save(Snapshot(1, {"model.w": torch.zeros(4)}, {}))
        with pytest.raises(CheckpointError, match="No space left"):
            store.save(Snapshot(2, {"model.w": torch.zeros(4)}, {}))
    assert store.steps() == []


def test_values_without_a_form_and_odd_steps_are_user_errors(store: CheckpointStore) -> None:
    with pytest.raises(UserError, match=r"values\.schedule\.f"):
        store.save(Snapshot(1, {}, {"schedule": {"f": print}}))
    with pytest.raises(UserError, match="step -1"):
        store.save(Snapshot(-1, {}, {}))


def test_an_interrupted_wait_does_not_forget_the_save(store: CheckpointStore, monkeypatch: Any) -> None:
    with slow_files(monkeypatch) as go_on:
        store.save(Snapshot(1, {"model.w": torch.ones(4)}, {}))
        assert store._pending is not None
        with monkeypatch.context() as patch:
            patch.setattr(store._pending[0], "result", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                store.finish()
        go_on.set()
        store.finish()
    assert store.steps() == [1]


def change_file(store: CheckpointStore, step: int) -> None:
    file = next(store._folder.path(step).glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_an_altered_checkpoint_is_refused_and_the_newest_sound_one_named(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        save(store, step, float(step))
    for step in (3, 2):
        change_file(store, step)
        with pytest.raises(
            CheckpointError, match=rf"step-0000000{step}[^$]*was altered[^$]*resume from step {step - 1}"
        ):
            store.load(step)
    assert loaded(store, 1).tolist() == [1.0] * 4
    change_file(store, 1)
    with pytest.raises(CheckpointError, match="no other sound checkpoint"):
        store.load()


def test_the_newest_sound_checkpoint_is_taken_and_the_others_named(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        save(store, step, float(step))
    assert store.load().step == 3 and store.passed_over == ""
    change_file(store, 3)
    assert store.load().step == 2
    assert re.fullmatch(r"the checkpoint of step 3 is not sound \(\S+ was altered: .*\)", store.passed_over)
    store._folder.path(9).mkdir()  # empty
    assert store.load().step == 2 and "step 9 is not sound (manifest.json is missing)" in store.passed_over
    save(store, 9, 9.0)
    assert store.load().step == 9


def signed_change(store: CheckpointStore, step: int, change: Any) -> None:
    from evenly.checkpoint import manifest

    path = store._folder.path(step) / "manifest.json"
    fields = json.loads(path.read_text())
    del fields["digest"]
    change(fields)
    path.write_text(json.dumps({**fields, "digest": manifest._digest(fields)}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.update(format="other"), "not of the format"),
        (lambda m: m.update(version=9), "format version 9"),
        (lambda m: m["tensors"].update({"model.x": {"dtype": "float32", "shape": [1]}}), "model.x is not in"),
        (lambda m: m["tensors"]["model.w"].update(shape=[8]), "its files and its manifest differ"),
        (lambda m: m["tensors"]["model.w"].update(dtype="float64"), "its files and its manifest differ"),
        (lambda m: m.update(values={"a": {"$": "gone"}}), "malformed"),
        (lambda m: m.update(files={}), "is not in its manifest"),
    ],
)
def test_a_foreign_checkpoint_is_refused_even_with_a_right_digest(store: Any, change: Any, reason: str) -> None:
    save(store, 1)
    save(store, 2)
    signed_change(store, 2, change)
    with pytest.raises(CheckpointError, match=rf"{reason}[^$]*resume from step 1"):
        store.load(2)
    assert store.load().step == 1


def test_a_file_with_a_right_hash_but_a_broken_header_is_refused(store: CheckpointStore) -> None:
    from records import record_file

    save(store, 1)
    file = next(store._folder.path(1).glob("*.safetensors"))
    file.write_bytes(b"\xff" * 64)
    record = record_file(file)
    signed_change(store, 1, lambda m: m["files"][file.name].update(size_bytes=64, xxh3=record.xxh3))
    with pytest.raises(CheckpointError, match=r"header of shard-\S+ is malformed"):
        store.load()


def test_a_manifest_beyond_all_measure_is_not_read(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)
    monkeypatch.setattr(folder, "MANIFEST_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"its manifest has \d+ bytes, and may have 100"):
        store.load()


def test_no_checkpoint_and_no_such_step_say_what_there_is(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="there is none"):
        store.load()
    save(store, 4)
    with pytest.raises(CheckpointError, match="there are those of 4"):
        store.load(3)


@pytest.mark.parametrize(
    ("into", "reason"),
    [
        ({"model.w": torch.zeros(4, dtype=torch.float64)}, r"float32\[4\] in the checkpoint, float64\[4\] here"),
        ({"model.w": torch.zeros(5)}, r"float32\[4\] in the checkpoint, float32\[5\] here"),
        ({"model.w": torch.zeros(4), "model.v": torch.zeros(1)}, "model.v is not in the checkpoint"),
        ({}, "model.w is in the checkpoint only"),
    ],
)
def test_tensors_of_another_model_are_refused_untouched(store: Any, into: dict[str, Tensor], reason: str) -> None:
    save(store, 1, 7.0)
    with pytest.raises(CheckpointError, match=reason):
        store.load().read(into)
    assert all(tensor.eq(0).all() for tensor in into.values())


def make() -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    return model, optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        model(batch).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("at", [0, 4])
def test_a_run_continued_is_the_run_uninterrupted(store: CheckpointStore, at: int) -> None:
    model, optimizer = make()
    train(model, optimizer, range(at))
    store.save(Snapshot(at, *read_state(model, optimizer)))
    train(model, optimizer, range(at, 8))
    other_model, other = make()
    train(other_model, other, range(20, 22))
    restore(store.load(), other_model, other)
    train(other_model, other, range(at, 8))
    expected, found = read_state(model, optimizer), read_state(other_model, other)
    assert found[1] == expected[1] and list(found[0]) == list(expected[0])
    assert all(bits(found[0][name]) == bits(tensor) for name, tensor in expected[0].items())


def test_another_optimizer_is_refused_with_nothing_changed(store: CheckpointStore) -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    store.save(Snapshot(1, *read_state(model, optimizer)))
    other_model, _ = make()
    before = [bits(p) for p in other_model.parameters()]
    with pytest.raises(CheckpointError, match="saved by AdamW"):
        restore(store.load(), other_model, optim.SGD(other_model.parameters()))
    assert [bits(p) for p in other_model.parameters()] == before


def test_files_are_bounded_by_size(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = {name: TensorForm("float32", (size,)) for name, size in (("a", 10), ("b", 10), ("c", 100), ("d", 1))}
    assert file_numbers(forms, file_bytes=80) == {"a": 1, "b": 1, "c": 2, "d": 3}
    monkeypatch.setattr(tensors_module, "file_numbers", lambda forms: file_numbers(forms, 80))
    tensors = {name: torch.randn(form.shape) for name, form in forms.items()}
    store.save(Snapshot(1, tensors, {}))
    into = blank(tensors)
    store.load().read(into)
    assert all(bits(into[name]) == bits(tensors[name]) for name in forms)
    assert len(list(store._folder.path(1).glob("*.safetensors"))) == 3


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 1000)), st.integers(1, 5))
def test_writing_is_dealt_out_evenly(sizes: dict[str, int], ranks: int) -> None:
    owners = deal_out(sizes, ranks)
    assert owners.keys() == sizes.keys()
    loads = [sum(sizes[name] for name, owner in owners.items() if owner == rank) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
    assert owners == deal_out(dict(reversed(sizes.items())), ranks)

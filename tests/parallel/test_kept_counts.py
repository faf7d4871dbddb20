"""Where the code of a job keeps what it counts is found, moved on and put back."""

from __future__ import annotations

import logging
import random
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from evenly.parallel.core.places import FEW, LONGER, all_restored, is_generator, places, places_restored, put_back

GLOBAL, UNNAMED = 3, 4
HERE = __name__


def by_default(kept: dict[str, int] = {"n": 3}, *, other: list[int] = [3]) -> int:  # noqa: B006
    kept["n"] += 1
    other[0] += 1
    return GLOBAL


class Counting(nn.Module):
    of_class = 3

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.number, self.fraction, self.flag, self.word = 3, 3.0, True, "three"
        self.by_numpy = np.int64(3)
        self.array, self.tensor = np.full(2, 3), torch.full((2,), 3)
        self.object = types.SimpleNamespace(inner=types.SimpleNamespace(number=3))
        self.nested = {"a": [(deque([3]),)], 7: 3}
        self.parameters_again = [*self.parameters()]
        self.module = types  # of Python's library
        self.held = {"gone": weakref.proxy(nn.Linear(1, 1))}
        kept = 3

        def closed() -> int:
            nonlocal kept
            kept += 1
            return kept

        closed.times = 3  # pyright: ignore[reportFunctionMemberAccess]
        self.calls = partial(closed)
        self.register_forward_hook(self.hook)

    def hook(self, *_: Any) -> None:
        by_default()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


NAMES = {
    "number", "fraction", "by_numpy", "array", "tensor", "object.inner.number", "nested['a']", "nested['a'][0][0]",
    "nested['a'][0][0][0]", "nested[7]", "calls.kept", "calls.times", f"{HERE}.Counting.of_class", f"{HERE}.GLOBAL",
}  # fmt: skip


def of(model: nn.Module) -> dict[str, Any]:
    return {name: place.value for name, place in places([("", model)]).items()}


def test_all_that_may_count_is_found_by_its_way() -> None:
    found = of(Counting())
    assert found.keys() >= NAMES, NAMES - found.keys()
    assert {float(np.asarray(found[name]).flat[0]) for name in NAMES - {"nested['a']", "nested['a'][0][0]"}} == {3.0}
    assert any(name.endswith("()[0]['n']") for name in found) and any(name.endswith("()['other'][0]") for name in found)


def test_state_and_what_is_no_number_of_the_job_is_not() -> None:
    found = of(Counting())
    for word in ("weight", "bias", "running", "num_batches", "flag", "word", "UNNAMED", "gone", "module"):
        assert not [name for name in found if word in name], word
    assert [name for name in found if "parameters_again" in name] == ["parameters_again"]  # itself, a list


def test_what_is_large_is_not_looked_into() -> None:
    model = Counting()
    model.nested = {"few": [0] * FEW, "many": [0] * (FEW + 1)}
    model.tensor, model.array = torch.zeros(FEW + 1), np.zeros(FEW + 1)
    found = of(model)
    assert "nested['few'][0]" in found and "nested['many'][0]" not in found and len(found["nested['many']"]) == FEW + 1
    assert "tensor" not in found and "array" not in found


def count(model: Any) -> None:
    """Goes on by one everywhere."""
    global GLOBAL
    GLOBAL += 1
    Counting.of_class += 1
    model.number += 1
    model.fraction += 1
    model.by_numpy += 1
    model.array += 1
    model.tensor += 1
    model.object.inner.number += 1
    model.nested[7] += 1
    model.nested["a"][0][0][0] += 1
    model.nested["a"].append(5)
    model.calls()
    model.calls.func.times += 1
    by_default()


def test_what_is_counted_is_put_back() -> None:
    model, keeps = Counting(), Counting()
    before, objects = of(model), [model.array, model.tensor, model.nested["a"]]
    with places_restored([("", model)]):
        count(model)
        now = of(model)
        assert {name for name in NAMES if not np.array_equal(now[name], before[name])} == NAMES
    after = of(model)
    assert after.keys() == before.keys() == of(keeps).keys()
    for name in NAMES - {"nested['a']"}:
        assert np.array_equal(after[name], before[name]), name
    assert len(model.nested["a"]) == 1 and model.calls() == 4
    assert [*map(id, objects)] == [*map(id, [model.array, model.tensor, model.nested["a"]])]


GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "random": lambda: random.Random(3),
    "numpy": lambda: np.random.default_rng(3),
    "numpy, as it was": lambda: np.random.RandomState(3),
}


def drawn(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return torch.randn(1, generator=generator).item()
    return generator.gauss() if isinstance(generator, random.Random) else float(generator.standard_normal())


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_are_put_back_and_moved_on(kind: str) -> None:
    kept = GENERATORS[kind]()
    roots = [("", types.SimpleNamespace(kept=kept))]
    before = places(roots)
    with places_restored(roots):
        number = drawn(kept)  # which may keep a second one for the next call
    now = places(roots)
    assert [*now] == [*before] and not any(now[name].differs(before[name]) for name in now)
    assert drawn(kept) == number
    found = places(roots)["kept"]
    assert found.differs(before["kept"])
    found.put(before["kept"], 3)
    assert drawn(kept) != number
    found.put(before["kept"])
    assert drawn(kept) == number


def test_generators_of_all_code_are_not() -> None:
    shared: Any = (random.random, np.random.random_sample)
    kept = [torch.default_generator, *(one.__self__ for one in shared), random.SystemRandom(), random.Random(3)]
    assert [one for one in kept if is_generator(one)] == kept[-1:]


def test_it_is_put_back_where_something_raises() -> None:
    model = Counting()
    with pytest.raises(KeyError), places_restored([("", model)]):
        model.number += 1
        raise KeyError
    assert model.number == 3


@pytest.mark.parametrize(
    ("change", "jumped"),
    [
        (lambda model: setattr(model, "number", 4), 13),
        (lambda model: model.tensor.add_(1), [13, 13]),
        (lambda model: model.nested["a"].append(5), 11),
    ],
)
def test_counts_go_on_by_what_is_asked(change: Callable[[Any], None], jumped: Any) -> None:
    model = Counting()
    before = places([("", model)])
    change(model)
    now = places([("", model)])
    (name,) = {name for name, place in now.items() if place.differs(before.get(name)) and "][" not in name}
    now[name].put(before[name], 10)
    found = of(model)[name]
    assert (
        found.tolist() if isinstance(found, torch.Tensor) else len(found) if name == "nested['a']" else found
    ) == jumped
    now[name].put(before[name], 10 * LONGER)
    assert name != "nested['a']" or len(model.nested["a"]) == 1 + LONGER
    put_back([("", model)], before)
    assert not places([("", model)])[name].differs(before[name])


def test_what_has_another_form_is_left() -> None:
    model = Counting()
    before = places([("", model)])
    model.tensor, model.number = torch.zeros(3, dtype=torch.int64), 4.5  # pyright: ignore[reportAttributeAccessIssue]
    put_back([("", model)], before)
    assert model.tensor.tolist() == [0, 0, 0] and model.number == 4.5
    assert not before["fraction"].differs(before["fraction"])


def test_what_is_not_a_number_is_the_same_again() -> None:
    model = Counting()
    model.fraction = float("nan")
    before = places([("", model)])
    assert not [name for name, place in places([("", model)]).items() if place.differs(before[name])]


class Notes:
    """What code notes when it has set a number."""

    word = "none"

    def __init__(self) -> None:
        self.number, self.known, self.names = 0, dict[str, int](), set[str]()


NOTES = Notes()
READY: Any = False
WIDTH: Any = None
LOG = logging.getLogger(HERE)


class SettingOnce(nn.Module):
    done = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global READY, WIDTH
        NOTES.known["width"], NOTES.number, NOTES.word = 3, 3, "found"
        NOTES.names.add("width")
        NOTES.new = True  # pyright: ignore[reportAttributeAccessIssue]
        Notes.word, READY, WIDTH, self.done = "found", torch.ones(2), np.ones(2), True
        LOG.disabled = True
        return x


def noted(model: SettingOnce) -> tuple[Any, ...]:
    return vars(NOTES).copy(), NOTES.known.copy(), NOTES.names.copy(), Notes.word, READY, WIDTH, model.done


def test_what_a_first_call_notes_is_put_back_with_what_it_sets() -> None:
    model, known = SettingOnce(), NOTES.known
    before = noted(model)
    with all_restored([("", model)]):
        model(torch.ones(1))
        assert noted(model) != before
    assert noted(model) == before and NOTES.known is known
    assert LOG.disabled  # a logger is not the job's alone
    LOG.disabled = False
    model(torch.ones(1))
    now = noted(model)
    with all_restored([("", model)]):
        NOTES.known.pop("width")
        NOTES.known["height"] = 3
        NOTES.names.clear()
    assert noted(model) == now


class Lazy(OrderedDict[str, Any]):
    """Entries that are imported when they are asked for, as transformers maps configurations to models."""

    def items(self) -> Any:
        raise ValueError("could not be imported")

    __iter__ = keys = values = copy = items  # type: ignore[assignment]


class Registry(dict[Any, Any]):
    """Methods with other arguments than a dict's, as a library of models has one."""

    def get(self, model: nn.Module) -> Any:  # type: ignore[override]
        return super().get(type(model))


def test_entries_that_a_dict_computes_are_not_asked_for() -> None:
    model: Any = nn.Linear(2, 2)
    model.lazy, model.masked, model.registry = Lazy(made=[1.0]), np.ma.masked, Registry(known=None)
    with all_restored([("", model)]), places_restored([("", model)]):
        model.lazy["made"].append(2.0)
    assert dict.__getitem__(model.lazy, "made") == [1.0]


def test_what_is_named_as_a_table_of_modules_is_put_back_elsewhere() -> None:
    model: Any = nn.Linear(2, 2)
    model.kept = Notes()
    model.kept._buffers = {}
    with all_restored([("", model)]):
        model.kept._buffers["width"] = 3
    assert model.kept._buffers == {}


def test_hooks_added_to_modules_meanwhile_stay() -> None:
    model = nn.Linear(2, 2)
    with all_restored([("", model)]):
        model.register_forward_pre_hook(lambda module, given: None)
        model.register_forward_hook(lambda module, given, output: None)
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1

"""Nests of tensors, and what is hidden from `map_tensors`: tensors in objects, and iterators."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from evenly.data.nest import has_tensor, hidden_in, map_tensors, tensors_by_path

HIDDEN, SEEN = torch.ones(1), torch.zeros(2)


class Plain:
    def __init__(self, value: Any) -> None:
        self.value, self.size = value, 3


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass
class Fields:
    seen: torch.Tensor
    made: torch.Tensor = field(init=False, default_factory=lambda: HIDDEN)


class Named(dict[str, Any]):
    """With its items as attributes too, as results of transformers have them."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        vars(self).update(items)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Plain(HIDDEN),
        lambda: (SEEN, {"a": [Plain({"b": (HIDDEN,)})]}),
        lambda: Slots(Plain(HIDDEN)),
        lambda: Fields(SEEN),
        lambda: Named(seen=SEEN, other=Plain(HIDDEN)),
        lambda: torch.distributions.Exponential(HIDDEN),
    ],
)
def test_tensors_in_objects_are_hidden(make: Callable[[], Any]) -> None:
    nest = make()
    assert {id(one) for one in hidden_in(nest)} == {id(HIDDEN)}
    assert all(one is SEEN for _, one in tensors_by_path(nest))


def test_an_iterator_is_named_and_not_asked() -> None:
    made = iter([HIDDEN])
    assert [*hidden_in((SEEN, made))] == [made] and next(made) is HIDDEN
    assert [*hidden_in(Plain(iter([HIDDEN])))] == []  # an object may have one for what it is


def test_nothing_is_hidden_in_nests_and_modules() -> None:
    around = Plain(None)
    around.value = around
    model = nn.Linear(1, 1)
    for nest in (SEEN, [SEEN, (1, "a", None)], {"x": SEEN}, Named(x=SEEN), model, Plain(model), Plain, around):
        assert [*hidden_in(nest)] == []


class Pair(NamedTuple):
    one: Any
    other: Any


@dataclass
class Kept:
    one: Any
    other: Any = 3


PLAIN, OTHER = torch.zeros(2), nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    "nest",
    [
        OTHER,
        (PLAIN, OTHER),
        [PLAIN, [PLAIN, (OTHER,)]],
        {"a": PLAIN, "b": {"c": OTHER}},
        OrderedDict(a=OTHER),
        Pair(PLAIN, OTHER),
        Kept(PLAIN, [OTHER]),
        ((), {"x": Kept(OTHER)}),
    ],
)
def test_a_tensor_of_a_class_is_found_wherever_it_is(nest: Any) -> None:
    assert has_tensor(nn.Parameter, nest)
    assert has_tensor(torch.Tensor, nest)


@pytest.mark.parametrize("nest", [PLAIN, (PLAIN, 3, None), [], {"a": [PLAIN]}, Kept(PLAIN), "text", Kept])
def test_others_are_not_taken_for_it(nest: Any) -> None:
    assert not has_tensor(nn.Parameter, nest)


class Labelled(dict[str, Any]):
    """A dict that is made of something else."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label


def test_mappings_that_do_not_take_a_dict_keep_their_type_and_what_they_have_besides() -> None:
    lists, labelled = defaultdict(list, a=SEEN), Labelled("b")
    labelled["a"] = SEEN
    for nest in (lists, labelled):
        found = map_tensors(lambda one: one + 1, nest)
        assert type(found) is type(nest) and found["a"].tolist() == [1, 1] and nest["a"] is SEEN
        assert getattr(found, "label", "b") == "b" and getattr(found, "default_factory", list) is list


class Held(MutableMapping[str, Any]):
    """Has its items in a dict, which a copy of it would have in common with it."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self.items_ = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


def test_a_mapping_is_never_changed() -> None:
    nest = Held({"a": SEEN})
    found = map_tensors(lambda one: one + 1, nest)
    assert type(found) is Held and found["a"].tolist() == [1, 1] and nest["a"] is SEEN

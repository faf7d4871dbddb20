"""Attributes of modules: compared, and put back."""

from __future__ import annotations

from torch import nn

from evenly.parallel.core.attributes import attributes_restored, own_attributes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls, self.seen = nn.Linear(2, 2), 0, [1]


def test_what_changes_in_attributes_is_put_back() -> None:
    model = Net()
    inner, before = model.inner, own_attributes(model)
    with attributes_restored(model):
        model.calls += 1
        model.inner.in_features = 7
        model.inner = nn.Linear(2, 2)
        model.kind = "other"
        found = own_attributes(model)
    changed = {name for name in {*before, *found} if before.get(name) != found.get(name)}
    assert changed == {"calls", "inner", "kind"}
    assert own_attributes(model) == before and model.inner is inner


def test_a_list_that_grew_has_changed() -> None:
    model = Net()
    before = own_attributes(model)
    model.seen.append(2)
    assert own_attributes(model) != before

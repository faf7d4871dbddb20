"""Results of operations on fake tensors, made again from their forms: shapes, strides, types.

What an operation makes of fake tensors follows from the forms of these and from its other arguments. To find it out
takes torch longer than the operation itself with numbers; runs of a model meet the same ones again and again: in equal
blocks, in microbatches of one size under several plans.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from evenly.torch_private import FakeMaker, fake_form, is_fake

Form = tuple[Hashable, ...]
PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
LISTS = frozenset({list, tuple, torch.Size})


class _Made(NamedTuple):
    """How one result is made. number: of the tensor that it is (no form) or whose memory it has; None: of its own."""

    number: int | None
    form: Form | None = None


class _Recipe(NamedTuple):
    """kind: of the list of results; None where there is but one."""

    kind: type | None
    made: tuple[_Made, ...]


@dataclass
class FakeResults:
    """What operations were found to make. notes: more that follows from the same keys."""

    notes: dict[Form, Any] = field(default_factory=dict[Form, Any])
    _recipes: dict[Form, _Recipe | None] = field(default_factory=dict[Form, Any])

    def key(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Form | None:
        """All that the results of `func` follow from; None where it is not all known."""
        found: list[Hashable] = [func, torch.get_default_dtype()]
        known = _add(found, args) and (not kwargs or (_add(found, [*kwargs]) and _add(found, [*kwargs.values()])))
        return tuple(found) if known else None

    def again(self, key: Form, given: Sequence[torch.Tensor], maker: FakeMaker) -> Any:
        """What the operation of `key` makes of the tensors that it is given; NotImplemented where it must run."""
        recipe = self._recipes.get(key)
        if recipe is None:
            return NotImplemented
        results = [_result(one, given, maker) for one in recipe.made]
        return results[0] if recipe.kind is None else recipe.kind(results)

    def find(
        self, key: Form, after: Form | None, given: Sequence[torch.Tensor], results: Any, maker: FakeMaker
    ) -> None:
        """Takes up what was made. after: the key of the same arguments when the operation has run."""
        if key not in self._recipes:
            self._recipes[key] = _recipe(given, results, maker) if after == key else None


def _add(found: list[Hashable], argument: Any) -> bool:
    """Adds all of an argument that results may follow from; False where it has more than that."""
    kind = type(argument)
    if is_fake(kind):
        form = fake_form(argument)
        found.append(form)
        return form is not None
    if kind in LISTS:
        found.append(len(argument))
        return all(_add(found, one) for one in argument)
    found += (kind, argument)
    return kind in PLAIN


def _result(one: _Made, given: Sequence[torch.Tensor], maker: FakeMaker) -> torch.Tensor:
    if one.form is None:
        assert one.number is not None
        return given[one.number]
    return maker.make(one.form, None if one.number is None else given[one.number].untyped_storage())


def _recipe(given: Sequence[torch.Tensor], results: Any, maker: FakeMaker) -> _Recipe | None:
    """None where the results are more than tensors of memory of their own, or of what was given."""
    kind = None if isinstance(results, torch.Tensor) else type(results)
    parts = [results] if kind is None else results
    if kind not in (None, tuple, list) or not all(is_fake(type(one)) for one in parts):
        return None
    made = [_made(one, given, maker) for one in parts]
    own = {id(part.untyped_storage()) for part, one in zip(parts, made, strict=True) if one and one.number is None}
    if None in made or len(own) < sum(one is not None and one.number is None for one in made):
        return None
    return _Recipe(kind, tuple(one for one in made if one is not None))


def _made(result: torch.Tensor, given: Sequence[torch.Tensor], maker: FakeMaker) -> _Made | None:
    number = next((number for number, one in enumerate(given) if one is result), None)
    if number is not None:
        return _Made(number)
    storage, form = result.untyped_storage(), fake_form(result)
    number = next((number for number, one in enumerate(given) if one.untyped_storage() is storage), None)
    if form is None or not maker.makes(result, form, None if number is None else storage):
        return None
    return _Made(number, form)

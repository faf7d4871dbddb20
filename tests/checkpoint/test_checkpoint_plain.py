from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenly.checkpoint.plain import decode, encode, merge
from evenly.errors import UserError

words = st.text("ab$\u00e9\ud800\n", max_size=3)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words
keys = words | st.integers() | st.tuples(st.integers(), words)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(st.just("$"), inner)
        | st.dictionaries(keys, st.integers()).map(Counter)
    ),
    max_leaves=6,
)


def same(a: object, b: object) -> bool:
    """Equal in value and type, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))  # type: ignore[arg-type]
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)  # type: ignore[index]
    return repr(a) == repr(b)


@settings(deadline=None, max_examples=60)
@given(values)
def test_decode_is_the_inverse_of_encode_through_strict_json(value: object) -> None:
    text = json.dumps(encode(value, "value"), allow_nan=False)
    assert same(decode(json.loads(text)), value)


def test_nan_and_infinities_survive() -> None:
    assert math.isnan(decode(encode(math.nan, "v")))
    assert decode(encode([math.inf, -math.inf, -0.0], "v")) == [math.inf, -math.inf, 0.0]


@pytest.mark.parametrize("value", [np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True), np.float64("inf")])
def test_numbers_of_numpy_keep_their_type(value: np.generic) -> None:
    found = decode(json.loads(json.dumps(encode({"lr": value}, "v"), allow_nan=False)))["lr"]
    assert type(found) is type(value) and found == value


def test_types_and_sizes_of_torch_have_a_form() -> None:
    assert decode(encode([torch.bfloat16, torch.Size([2, 3])], "v")) == [torch.bfloat16, (2, 3)]


@pytest.mark.parametrize("bad", [torch.ones(1), {1, 2}, b"x", object(), print, np.array(["a"])])
def test_what_has_no_form_is_named_by_its_place(bad: object) -> None:
    with pytest.raises(UserError, match=r"values\.a\[1\]\.b"):
        encode([0, {"b": bad}], "values.a")


@pytest.mark.parametrize("bad", [{"$": "gone"}, {"$": "tuple"}, {"$": "dict", "items": [1]}, {"$": ["x"], "items": 3}])
def test_malformed_kinds_are_value_errors(bad: object) -> None:
    with pytest.raises(ValueError):
        decode(bad)


def test_merge_unites_dicts_and_finds_disagreement() -> None:
    assert merge([{"a": {"x": 1}, "s": 3}, {"a": {"y": 2}, "s": 3}], "v") == {"a": {"x": 1, "y": 2}, "s": 3}
    with pytest.raises(ValueError, match=r"v\.a\.x"):
        merge([{"a": {"x": 1}}, {"a": {"x": 2}}], "v")
    with pytest.raises(ValueError, match=r"v\.a"):
        merge([{"a": True}, {"a": 1}], "v")

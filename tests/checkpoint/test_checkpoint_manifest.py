from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenly.checkpoint import manifest as m
from evenly.checkpoint.manifest import FileRecord, Manifest, TensorForm, Unsound, from_text, to_text

MANIFEST = Manifest(
    step=10,
    score=0.25,
    files={"shard-00001-model-00001-of-00001.safetensors": FileRecord(12, "ab")},
    tensors={"model.w": TensorForm("float32", (2, 3)), "model.s": TensorForm("int64", ())},
    values={"seed": 3, "nested": {"x": [1, None, 1.5]}},
)


def signed(change: dict[str, Any]) -> str:
    """A manifest with other fields and a right digest, as one who knows the rule could write it."""
    fields = json.loads(to_text(MANIFEST))
    del fields["digest"]
    fields.update(change)
    return json.dumps({**fields, "digest": m._digest(fields)})


def test_from_text_is_the_inverse_of_to_text() -> None:
    assert from_text(to_text(MANIFEST)) == MANIFEST


@settings(deadline=None, max_examples=100)
@given(st.integers(0, len(to_text(MANIFEST)) - 1), st.characters(max_codepoint=127))
def test_one_changed_character_is_seen_or_means_the_same(place: int, character: str) -> None:
    text = to_text(MANIFEST)
    changed = text[:place] + character + text[place + 1 :]
    try:
        assert from_text(changed) == MANIFEST  # white space between fields
    except Unsound:
        pass


@pytest.mark.parametrize(
    "text", ["", "x", "{", "3", "null", "[]", "{}", '"text"', '{"format": 1}', '{"format": ["evenly-checkpoint"]}']
)
def test_any_other_text_is_unsound(text: str) -> None:
    with pytest.raises(Unsound):
        from_text(text)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "other"}, "format"),
        ({"version": 3}, "format version 3, this evenly reads 2"),
        ({"version": 1}, "format version 1, this evenly reads 2"),
        ({"version": "1"}, "version"),
        ({"step": -1}, "step"),
        ({"step": True}, "step"),
        ({"score": "low"}, "score"),
        ({"values": []}, "values"),
        ({"files": {"../evil.safetensors": {"size_bytes": 1, "xxh3": ""}}}, "no name of a checkpoint file"),
        ({"files": {"/etc/x.safetensors": {"size_bytes": 1, "xxh3": ""}}}, "no name of a checkpoint file"),
        ({"files": {".hidden.safetensors": {"size_bytes": 1, "xxh3": ""}}}, "no name of a checkpoint file"),
        ({"files": {"a.safetensors\n": {"size_bytes": 1, "xxh3": ""}}}, "no name of a checkpoint file"),
        ({"files": {"a.pt": {"size_bytes": 1, "xxh3": ""}}}, "no name of a checkpoint file"),
        ({"files": {"a.safetensors": {"size_bytes": "1", "xxh3": ""}}}, "malformed"),
        ({"files": {"a.safetensors": 3}}, "malformed"),
        ({"files": None}, "files"),
        ({"tensors": {"w": {"dtype": "load", "shape": [-1]}}}, "shape of w"),
        ({"tensors": {"w": {"dtype": "__class__", "shape": []}}}, "form of w"),
        ({"tensors": {"w": {"dtype": 3, "shape": []}}}, "form of w"),
    ],
)
def test_every_field_is_checked(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsound, match=reason):
        from_text(signed(change))


def test_a_signed_manifest_without_changes_is_sound() -> None:
    assert from_text(signed({})) == MANIFEST


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": "evenly-checkpoint", "version": 2, "step": NaN}'])
def test_hostile_json_is_unsound(text: str) -> None:
    with pytest.raises(Unsound):
        from_text(text)


def test_a_number_beyond_floats_is_unsound() -> None:
    text = to_text(MANIFEST).replace("0.25", "1e999")
    with pytest.raises(Unsound, match="altered"):
        from_text(text)


def test_differences_name_what_differs() -> None:
    saved = {"a": TensorForm("float32", (2,)), "b": TensorForm("float32", ()), "c": TensorForm("int64", (1,))}
    wanted = {"a": TensorForm("float32", (3,)), "c": TensorForm("int64", (1,)), "d": TensorForm("int64", ())}
    assert m.differences(saved, wanted) == [
        "d is not in the checkpoint",
        "b is in the checkpoint only",
        "a is float32[2] in the checkpoint, float32[3] here",
    ]
    assert m.first_of(list("abcde")) == "a; b; c; and 2 more"

"""Derivations are kept under a key of all that they depend on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from traced import Attention, Grouped, LanguageModel, next_token_loss, own, tokens, transformer

from evenly.parallel.tensor.derivation_cache import cached, from_json, key_of, to_json
from evenly.parallel.tensor.splits import Derivation, derive
from evenly.parallel.tensor.trace import trace


def test_text_and_back() -> None:
    found = derive(trace(*own(Grouped(32, 2, "gqa"))))
    assert from_json(to_json(found)) == found


def test_derived_once(tmp_path: Path) -> None:
    asked: list[str] = []

    def derived() -> Derivation:
        asked.append("derive")
        return derive(trace(*own(Attention(32, 4, 8))))

    first = cached(tmp_path / "new", "key", derived)
    assert cached(tmp_path / "new", "key", derived) == first
    assert asked == ["derive"]
    (path,) = (tmp_path / "new").iterdir()
    path.write_text(path.read_text()[:-20])  # torn
    assert cached(tmp_path / "new", "key", derived) == first
    assert asked == ["derive"] * 2
    assert cached(path / "no folder", "key", derived) == first


def key(attention: nn.Module, **changes: object) -> str:
    model = LanguageModel(attention)
    for name, value in changes.items():
        setattr(model, name, value)
    return key_of(model, next_token_loss, tokens())


def test_a_key_changes_with_what_matters() -> None:
    keys = [
        key(Attention(32, 4, 8)),
        key(Attention(32, 2, 16)),  # of the same shapes
        key(Grouped(32, 4, "gqa")),
        key(Grouped(32, 4, "repeat")),
        key(Attention(32, 4, 8), norm=nn.LayerNorm(32, bias=False)),
        key(Attention(32, 4, 8), setting=3),
        key_of(LanguageModel(Attention(32, 4, 8)), next_token_loss, tokens(rows=2)),
        key_of(LanguageModel(Attention(32, 4, 8)), lambda model, ids: model(ids).sum(), tokens()),
        key_of(LanguageModel(Attention(32, 4, 8)).double(), next_token_loss, tokens()),
    ]
    tied = LanguageModel(Attention(32, 4, 8))
    tied.block.second.weight = tied.norm.weight
    assert len({*keys, key_of(tied, next_token_loss, tokens())}) == len(keys) + 1


def test_a_key_ignores_values_and_places() -> None:
    assert key(Attention(32, 4, 8)) == key(Attention(32, 4, 8))
    with torch.device("meta"):
        assert key(Attention(32, 4, 8)) == key_of(
            LanguageModel(Attention(32, 4, 8)), next_token_loss, torch.zeros_like(tokens(), device="cpu")
        )


PROGRAM = """
from traced import Attention, own, transformer
from evenly.parallel.tensor.derivation_cache import key_of
print(key_of(*{}))
"""


@pytest.mark.full_but("own")
@pytest.mark.parametrize("made", ["own(Attention(32, 4, 8))", 'transformer("gpt2")'], ids=["own", "gpt2"])
def test_a_key_is_the_same_in_every_process(made: str) -> None:
    """Python's hashes, and so the order of sets, differ from process to process."""
    paths = f"import sys; sys.path[:0] = {[str(Path(__file__).parent)]!r}"
    command = [sys.executable, "-W", "ignore", "-c", paths + PROGRAM.format(made)]
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)
    here = own(Attention(32, 4, 8)) if made.startswith("own") else transformer("gpt2")
    assert done.stdout.split()[-1] == key_of(*here)

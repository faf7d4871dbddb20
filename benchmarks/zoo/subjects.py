"""What is trained: subjects by name, each of one library.

A name without a prefix is a model type of transformers; `timm:convnext`, `diffusers:UNet2DModel` and
`peft:lora-llama` are of other libraries. A library is one module, `subjects_NAME.py`, with the functions of
`Library`. A subject is left out by a line in `exceptions.toml`, which says why.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import shrink
import torch
import torchvision_names
from samples import Samples, Shapes

torchvision_names.declare()  # before any library asks for torchvision
LIBRARIES = ("transformers", "timm", "diffusers", "peft")


class Library(Protocol):
    """The subjects of one library; a name has no prefix here."""

    def names(self) -> Collection[str]:
        """All subjects, those that are left out excepted."""
        ...

    def build(self, name: str) -> torch.nn.Module:
        """The small model, of random weights."""
        ...

    def batches(self, name: str) -> Iterator[Shapes]:
        """The kinds of a batch that it may take, the likeliest first."""
        ...

    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The mean loss of a batch."""
        ...

    def head(self, name: str) -> str:
        """What it is trained for, in a word or two."""
        ...

    def avoided(self, name: str) -> frozenset[int]:
        """Numbers of tokens that are not drawn."""
        ...

    def experts(self, name: str) -> int:
        """The most experts that one of its layers has; 0: it is no mixture of experts."""
        ...


def split(name: str) -> tuple[str, str]:
    """The library of a subject, and its name there."""
    before, colon, after = name.partition(":")
    if not colon:
        return LIBRARIES[0], name
    if before not in LIBRARIES:
        raise ValueError(f"{name}: no library of the zoo is called {before}, only {', '.join(LIBRARIES)}")
    return before, after


def library(name: str) -> Library:
    """The module of a library."""
    if importlib.util.find_spec(name) is None:
        raise ModuleNotFoundError(f"{name} is not installed: pip install -r benchmarks/zoo/requirements.txt")
    return cast(Library, importlib.import_module(f"subjects_{name}"))


def names_of(name: str) -> list[str]:
    """The names of all subjects of a library, as the campaign takes them."""
    prefix = "" if name == LIBRARIES[0] else f"{name}:"
    return [f"{prefix}{one}" for one in library(name).names() if f"{prefix}{one}" not in shrink.left_out()]


def build(name: str) -> torch.nn.Module:
    """The model of a subject, as a job's `model` builds it."""
    of, own = split(name)
    return library(of).build(own)


@dataclass(frozen=True)
class Subject:
    """What is trained; parameters: how many; loss: of the batch at the start; experts: in one layer."""

    name: str
    head: str
    class_name: str
    batch: Shapes
    parameters: int
    loss: float
    experts: int


def subject(name: str) -> Subject:
    """Builds the model and looks for a batch. Raises what the first kind of batch raised."""
    of, own = split(name)
    torch.manual_seed(0)
    random.seed(0)
    model = library(of).build(own).double().train()
    first: Exception | None = None
    for shapes in library(of).batches(own):
        try:
            found = _first_loss(library(of), own, model, shapes)
        except Exception as error:
            first = first or error
            continue
        size = sum(p.numel() for p in model.parameters())
        facts = (library(of).head(own), type(model).__name__, shapes, size, found)
        return Subject(name, *facts, library(of).experts(own))
    raise first or ValueError("no kind of batch is known for it")


def _first_loss(of: Library, own: str, model: torch.nn.Module, shapes: Shapes) -> float:
    """The loss of two samples, after a backward pass."""
    samples = Samples(shapes, of.avoided(own))
    batch = torch.utils.data.default_collate([samples[0], samples[1]])
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    found = of.loss(model, batch)
    found.backward()
    if not torch.isfinite(found):
        raise ValueError(f"the loss is {float(found)}")
    return float(found)

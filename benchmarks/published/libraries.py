"""How the libraries of published runs compute and communicate, where they do so otherwise than evenly.

What a library reaches is data, `libraries.toml`; what its blocks compute, save and compute again follows from
`LibraryKernels`. A published run may also have a context axis, and multiply in 8 bits or fewer; evenly's plans do not.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from evenly.model.parts import Collective, ModelCosts, OpCost, Recompute
from evenly.planner.footprint import Holdings
from evenly.planner.shape import Shape
from evenly.planner.shapes import ShapeSource, split_of
from evenly.planner.speeds import Library
from evenly.planner.training_config import TrainingConfig
from evenly.planner.transformer import (
    Kernels,
    Kind,
    Split,
    attention_elements,
    attention_flops,
    inner_saved,
    mlp_width,
    stream_saved,
    twice,
    widths,
)

FILE = Path(__file__).with_name("libraries.toml")
WIDE = ("float64", "float32", "bfloat16", "float16")
# What a block that recomputes selectively computes again in the backward pass:
#   attention  scores, softmax and what they weigh, as in Megatron-LM (Korthikanti et al. 2022, section 4)
#   rest       all but queries, keys and values, as MaxText's save_qkv_proj
#   blocks     every second block all of it, the others nothing, as IBM's fms-fsdp
#   operations every second matrix product, and all that is neither product nor attention, as torchtitan (its policy, in
#              models/llama3/parallelize.py, saves the products 1, 3, 5 and 7 of q, k, v, output, gate, up, down)
Selective = Literal["attention", "rest", "blocks", "operations", "all", "nothing"]


@dataclass(frozen=True, kw_only=True)
class LibraryKernels(Kernels):
    """How a library computes blocks.

    attention:    "fused" never writes the scores of all pairs of tokens; "naive" does, and saves them.
    selective:    what selective recomputation computes again.
    dropout:      whether a mask is drawn where a block's output joins (and in naive attention).
    kept_hidden, kept_ffn: elements per token, in widths of the residual stream and of the MLP, that a block saves
                  besides those that fused kernels need.
    gathers_kept: whether what the tensor axis gathers from split tokens is saved whole.
    narrow:       whether products of types of 8 bits and fewer save their inputs in that type (Transformer Engine).
    compiled:     whether what nothing needs again is not saved, though the policy of operations says so.
    """

    attention: Literal["fused", "naive"] = "fused"
    selective: Selective = "attention"
    dropout: bool = False
    kept_hidden: float = 0.0
    kept_ffn: float = 0.0
    gathers_kept: bool = False
    narrow: bool = False
    compiled: bool = False

    def of_block(self, number: int) -> Kernels:
        if self.selective != "blocks":
            return self
        return replace(self, selective="all" if number % 2 else "nothing")

    def attend(self, shape: Shape, split: Split, *, causal: bool) -> Sequence[OpCost]:
        """Naive: scores are computed of all pairs, then scaled, masked and normalised in one pass, and dropped out."""
        if self.attention == "fused":
            return super().attend(shape, split, causal=causal)
        pairs, element = _pairs(shape, split), split.element_bytes
        scores = OpCost(
            kind="matmul",
            flops=attention_flops(shape, split) * split.sequence,
            moved_bytes=(attention_elements(shape, split) + 2 * pairs) * element,
            rows=split.sequence,
            inner=shape.head_dim,
            columns=split.sequence,
            dtype=split.outer_dtype,
        )
        return [scores, OpCost(kind="memory", moved_bytes=pairs * (2 + 2.5 * self.dropout) * element)]

    def attend_backward(self, one: OpCost) -> OpCost:
        return super().attend_backward(one) if one.kind == "attention" else twice(one)

    @property
    def join_passes(self) -> float:
        return self.residual_passes + 1.25 * self.dropout

    def recomputed(
        self, products: Sequence[OpCost], attention: Sequence[OpCost], passes: Sequence[OpCost]
    ) -> Sequence[OpCost]:
        if self.selective == "attention":
            return attention
        if self.selective == "rest":  # all products but the first, of queries, keys and values
            return [*products[1:], *attention, *passes]
        if self.selective == "operations":  # output, and as much as gate or up; keys are few
            return [products[1], products[-1], *passes]
        return [*products, *attention, *passes] if self.selective == "all" else []

    def sums_again(self, sums: Sequence[Collective]) -> Sequence[Collective]:
        return [] if self.selective in ("attention", "nothing") else super().sums_again(sums)

    def saved_bytes(self, shape: Shape, kind: Kind, split: Split) -> dict[Recompute, int]:
        e, most = split.element_bytes, self._without_softmax(shape, kind, split)
        softmax = (1 + kind.cross) * split.tokens * shape.heads / split.tensor * 4
        if self.attention == "naive":
            softmax = (1 + kind.cross) * _pairs(shape, split) * (e + (e + 1) * self.dropout)
        least = split.own_tokens * shape.hidden * e
        selective = {
            "attention": most,
            "rest": least + split.tokens * sum(widths(shape, split.tensor)) / split.tensor * e,
            "operations": least + _operations_saved(shape, split, last=not self.compiled),
            "all": least,
            "nothing": most + softmax,
        }
        return {"none": int(most + softmax), "selective": int(selective[self.selective]), "full": int(least)}

    def _without_softmax(self, shape: Shape, kind: Kind, split: Split) -> float:
        """With masks of dropout, what is gathered of split tokens, and what kernels that are not fused save besides."""
        own, whole, joins = split.own_tokens * shape.hidden, split.tokens * shape.hidden, 2 + kind.cross
        masks = own * joins * self.dropout
        gathered = (whole - own) * ((1 if shape.norms == 1 else 2) + kind.cross) * self.gathers_kept
        besides = split.tokens * (mlp_width(shape, kind) * self.kept_ffn + shape.hidden * self.kept_hidden)
        saved = stream_saved(shape, kind, split) + inner_saved(shape, kind, split)
        if self.narrow and split.dtype not in WIDE:
            saved = _narrow_saved(shape, kind, split)
        return saved + masks + (gathered + besides / split.tensor) * split.element_bytes


# Bytes of an element as products save it: scales of blocks of 32 and 16 elements are besides.
NARROW = {"float8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}


def _narrow_saved(shape: Shape, kind: Kind, split: Split) -> float:
    """Inputs of norms and activations and what attention needs in 16 bits; inputs of products in their type besides."""
    wide, narrow = split.element_bytes, NARROW[split.dtype]
    own, entered = split.own_tokens * shape.hidden, (1 if shape.norms == 1 else 2) + kind.cross
    width, keys = widths(shape, split.tensor)
    inner = (1 + kind.cross) * (width * (2 * wide + narrow) + keys * wide)
    inner += mlp_width(shape, kind) * ((shape.mlp_matrices - 1) * wide + narrow)
    return own * ((shape.norms + kind.cross) * wide + entered * narrow) + split.tokens * inner / split.tensor


def _operations_saved(shape: Shape, split: Split, *, last: bool) -> float:
    """Queries, values, attention's result with a float32 number per token and head, gate; the `last` product's."""
    width, keys = widths(shape, split.tensor)
    parted = 2 * width + keys / 2 + shape.ffn
    own = split.own_tokens * shape.hidden * last
    return (split.tokens * parted / split.tensor + own) * split.element_bytes + (
        split.tokens * shape.heads / split.tensor * 4
    )


def _pairs(shape: Shape, split: Split) -> float:
    """Scores of a rank where all pairs of tokens have one, whether or not they attend to each other."""
    return split.tokens * split.sequence * shape.heads / split.tensor


@dataclass(frozen=True, kw_only=True)
class PublishedLibrary(Library):
    """splits_sequence: whether its tensor axis shares the tokens too, in every plan that it chooses itself.

    turn_s: of each rank that zero cuts over, one after another, when it sends what it has updated.
    gathers: the type of 8 bits in which weights are gathered where products take them in it. Megatron-core's
             fp8_param_gather does so for scales of whole tensors; MXFP8 is made of 16 bits that have been gathered.
    """

    splits_sequence: bool = False
    turn_s: float = 0.0
    gathers: str = ""


@dataclass(frozen=True, kw_only=True)
class PublishedConfig(TrainingConfig):
    """context: ranks that share the tokens of a sample, as they share the gradients of the data axis.

    They lie between those of the tensor axis and those of the data axis. offloaded: blocks, from the first, whose
    activations wait for the backward pass in the host's memory; how they get there is taken to be hidden.
    """

    context: int = 1
    offloaded: int = 0

    @property
    def replicas(self) -> int:
        return self.data * self.context


@dataclass(frozen=True, kw_only=True)
class PublishedSplit(Split):
    """context: ranks that share the tokens of a sample. Of types of 8 bits and fewer activations have 16."""

    context: int = 1

    @property
    def tokens(self) -> int:
        return self.samples * self.sequence // self.context

    @property
    def outer_dtype(self) -> str:
        """Types of 8 bits and fewer are for the blocks' products with weights alone."""
        return self.dtype if self.dtype in WIDE else "bfloat16"


def published_split(config: TrainingConfig) -> PublishedSplit:
    """What one rank has of a microbatch."""
    context = config.context if isinstance(config, PublishedConfig) else 1
    return PublishedSplit(**vars(split_of(config)), context=context)


def offloaded(parts: ModelCosts, config: PublishedConfig) -> ModelCosts:
    """The parts, with what is offloaded no longer saved on the device.

    It is back there once what later blocks have saved is free: the peak lies before.
    """
    gone = config.offloaded
    if not gone:
        return parts
    empty = dict.fromkeys(("none", "selective", "full"), 0)
    blocks = [replace(one, saved_bytes=empty) if number < gone else one for number, one in enumerate(parts.blocks)]
    return replace(parts, blocks=blocks)


class PublishedSource(ShapeSource):
    """A known shape as a published library splits it."""

    def split(self, config: TrainingConfig) -> Split:
        return published_split(config)


def library_named(name: str, tables: Mapping[str, Any] | None = None) -> PublishedLibrary:
    """The library called `name`. tables: in the place of those of libraries.toml."""
    libraries = (tables or shipped_libraries())["libraries"]
    facts = {**libraries["any"], **libraries[name]}
    kernels, holdings = LibraryKernels(**facts.pop("kernels", {})), Holdings(**facts.pop("holdings"))
    facts.pop("source", None)
    return PublishedLibrary(kernels=kernels, holdings=holdings, **facts)


def library_names() -> list[str]:
    """All libraries that are known."""
    return [name for name in shipped_libraries()["libraries"] if name != "any"]


@cache
def shipped_libraries() -> Mapping[str, Any]:
    """What libraries.toml holds."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))

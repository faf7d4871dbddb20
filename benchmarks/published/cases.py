"""A published run as a prediction sees it: its shape, its cluster, its config and the library that it ran on.

A row says what was run; what it leaves open follows from the library, and each such inference stands here. A row that
leaves open what nothing implies is `Incomplete`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import benchmarks.published.zerobubble  # noqa: F401  (registers zb-2p)
from benchmarks.published.device_names import device_text
from benchmarks.published.libraries import (
    WIDE,
    LibraryKernels,
    PublishedConfig,
    PublishedLibrary,
    library_named,
    offloaded,
    published_split,
)
from benchmarks.published.recipes import Recipe, recipe_of
from benchmarks.published.rows import Incomplete, Predicted
from evenly.hardware.cluster import Cluster
from evenly.hardware.devices import find_device
from evenly.model.parts import ModelCosts, Recompute
from evenly.planner.footprint import Holdings, footprints
from evenly.planner.shape import Activation, Shape
from evenly.planner.speeds import speeds_of
from evenly.planner.time import Machine, stage_layers, step_time
from evenly.planner.transformer import transformer_parts

MOST_MICROBATCHES = 100_000  # of a step
Cells = Mapping[str, str]  # of a row, by column; empty where the file says nothing


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that a prediction takes; recipe: of the library, for this model, device and plan."""

    row: Cells
    shape: Shape
    cluster: Cluster
    config: PublishedConfig
    library: str
    recipe: Recipe | None = None


def predict_row(row: Cells) -> Predicted:
    """What is predicted of one row. Raises `Incomplete`."""
    case = case_of(row)
    library = library_named(case.library)
    parts = parts_of(case, library)
    machine = machine_of(case, library)
    layers = stage_layers(parts, case.config)
    step_s = seconds_of(case, parts, machine)
    if unclear := unclear_memory(case):
        return Predicted(step_s=step_s, peak_bytes=None, limit_bytes=None, unclear=unclear)
    held = footprints(offloaded(parts, case.config), layers, memory_config(case), holdings_of(case, library))
    return Predicted(
        step_s=step_s, peak_bytes=max(one.peak for one in held), limit_bytes=case.cluster.device.memory_bytes
    )


def machine_of(case: Case, library: PublishedLibrary, tables: Mapping[str, Any] | None = None) -> Machine:
    """What a case runs on. tables: in the place of speeds.toml's."""
    return Machine(case.cluster, speeds_of(case.cluster, tables), gathering(case, library))


def gathering(case: Case, library: PublishedLibrary) -> PublishedLibrary:
    """The library with the type in which it gathers the weights of a case."""
    narrow = case.config.dtype == library.gathers
    if narrow or re.search(r"(fp|float)8 all-gather", text(case.row, "precision")):
        return replace(library, weight_bytes=1.0)
    return library


def seconds_of(case: Case, parts: ModelCosts, machine: Machine) -> float:
    """Seconds of a step. What the update sends rank by rank comes on top."""
    library = machine.library
    assert isinstance(library, PublishedLibrary)
    turns = case.config.shards if case.config.zero else 0
    return step_time(parts, case.config, machine)[0].step_s + library.turn_s * turns


def memory_config(case: Case) -> PublishedConfig:
    """The config whose memory counts: in a pipeline torchtitan's shards are whole from the first pass to the last."""
    if case.library.startswith("torchtitan") and case.config.pipeline > 1 and case.config.zero:
        return replace(case.config, zero=3)
    return case.config


def unclear_memory(case: Case) -> str:
    """Why nothing can be said of a row's memory, or "": it says nothing of recomputation, and no recipe does.

    The rule knows what a row states, and nothing of what was measured.
    """
    if text(case.row, "activation_ckpt") or case.recipe is not None:
        return ""
    return "memory: recomputation is not stated, nor is the plan that of a recipe"


def holdings_of(case: Case, library: PublishedLibrary) -> Holdings:
    """What the library of a case holds in memory, in the version and for the types that the row has."""
    found = library.holdings
    if memory_config(case) != case.config:  # all blocks in 16 bits, and their gradients' sums in float32
        return replace(found, units=case.shape.layers, gathered=found.gathered + 4.0, reduced=0.0)
    if case.library == "torchtitan-compiled" and not _of_2024(case.row):
        # Since 2025 the loss is compiled as well: float32 logits, their gradient, and 16 bits of each
        # (torchtitan/components/loss.py).
        return replace(found, logit=8.0, logit_split=0.0)
    if "fp32 grad accumulation" in text(case.row, "notes"):  # a whole sum in float32 of the gradients in 16 bits
        return replace(found, gradients=found.gradients + 4.0)
    return found


def _of_2024(row: Cells) -> bool:
    return any(words in text(row, "source_ref") for words in ("202412", "PR #165", "Dec 2024", "(2024-"))


def case_of(row: Cells) -> Case:
    """The case of a row. Raises `Incomplete`."""
    library = library_of(row)
    cluster = _cluster(row)
    shape = _shape(row, library)
    config = _config(row, shape, library)
    recipe = _recipe(row, cluster, config) if library == "megatron-bridge" else None
    if recipe is not None:
        config = replace(config, offloaded=recipe.offloaded)
    return Case(row=row, shape=shape, cluster=cluster, config=config, library=library, recipe=recipe)


def _recipe(row: Cells, cluster: Cluster, config: PublishedConfig) -> Recipe | None:
    plan = Recipe(config.tensor, config.pipeline, config.context, config.microbatch, config.zero == 3)
    wide = config.dtype in WIDE
    size = re.match(r"\d+", text(row, "params_b"))
    return recipe_of(int(size[0]), cluster.device.kind, plan, wide=wide) if size else None


def parts_of(case: Case, library: PublishedLibrary) -> ModelCosts:
    """The model's parts for a case, as the library computes them."""
    config = case.config
    # GPT-3 is the only model of these sources that NeMo trains with dropout.
    kernels = library.kernels
    assert isinstance(kernels, LibraryKernels)
    if case.library == "nemo" and "GPT3" in case.row["model"]:
        kernels = replace(kernels, dropout=True)
    return transformer_parts(case.shape, published_split(config), kernels)


# ------------------------------------------------------------------------------------------------------- reading cells


def text(row: Cells, name: str) -> str:
    """A cell; "" where the column or the entry is missing."""
    return (row.get(name) or "").strip()


def count(row: Cells, name: str) -> int | None:
    """A cell that is a whole number, maybe written as 128.0; None where it is empty."""
    cell = text(row, name)
    if not cell:
        return None
    try:
        number = float(cell)
    except ValueError:
        raise Incomplete(f"{name} is {cell!r}, not a number") from None
    if not math.isfinite(number) or number != int(number) or number < 0:
        raise Incomplete(f"{name} is {cell!r}, not a whole number")
    return int(number)


def _needed(row: Cells, name: str) -> int:
    number = count(row, name)
    if not number:
        raise Incomplete(f"{name} is not stated")
    return number


# ----------------------------------------------------------------------------------------------------------- libraries

# By source, as far as one ran only one; the rest by what the row says.
LIBRARIES = {
    "megatron-2020-tables": "megatron-2020",
    "megatron-core-h100": "nemo",
    "megatron-core-h100-fp8": "nemo",
    "zerobubble-2401.10241": "megatron-2023",
    "megascale-2402.15627": "megatron-2023",
    "pytorch-ibm-2024": "torch-fsdp",
    "bloom-prequel": "megatron-deepspeed",
    "bigscience-1b3-v100": "megatron-deepspeed",
    "bigscience-gpt2-v100": "megatron-deepspeed",
    "nvidia-dgxc-memory": "nemo",
    "megatron-bridge": "megatron-bridge",
    "nanotron-ultrascale": "nanotron-2025",
    "nanotron-oldbench": "nanotron-2024",
    "internevo": "internevo",
}
PADDING = ("megatron-2020", "megatron-2021", "megatron-2023", "megatron-deepspeed", "nemo", "megatron-bridge")


def library_of(row: Cells) -> str:
    """Which library, of which time, ran it."""
    source, gpus = text(row, "source"), count(row, "gpus") or 0
    if "MaxText" in text(row, "model"):
        return "maxtext"
    if source == "mpt-llmfoundry":
        # The large H100 runs of 2024 had flash-attn 2, but for two sizes.
        later = "H100" in text(row, "gpu") and gpus >= 128 and text(row, "model") not in ("MPT-13b", "MPT-30b")
        return "llm-foundry-2024" if later else "llm-foundry"
    if source == "megatron-2104.04473":
        return "deepspeed-zero3-2021" if text(row, "zero_stage") == "3" else "megatron-2021"
    if source.startswith("nvidia-dgxc"):
        return "nemo"
    if source == "torchtitan":
        return "torchtitan-compiled" if _is_compiled(row) else "torchtitan"
    return LIBRARIES.get(source) or _library_by_facts(row)


def _is_compiled(row: Cells) -> bool:
    """Whether blocks are: as the row says, else as its notes say of the recipe's file."""
    stated = text(row, "compile").lower() or ("true" if "toml: true" in text(row, "notes") else "")
    return stated == "true"


def _library_by_facts(row: Cells) -> str:
    attention, wide = text(row, "attention").lower(), (count(row, "tp") or 1) * (count(row, "pp") or 1) > 1
    if "te fused" in attention or "cudnn" in attention or "fp8" in text(row, "precision").lower():
        return "nemo"
    if "naive" in attention:
        return "megatron-2021"
    if text(row, "zero_stage") in ("2", "3") and not wide:
        return "torch-fsdp"
    return "nemo" if "H100" in text(row, "gpu") else "megatron-2021"


# ------------------------------------------------------------------------------------------------------------- cluster


def _cluster(row: Cells) -> Cluster:
    gpu = text(row, "gpu")
    named = device_text(gpu)
    if named is None:
        raise Incomplete(f"the device {gpu!r} is not known")
    device = find_device(named)
    gpus, node = _needed(row, "gpus"), count(row, "gpus_per_node") or device.node
    network = text(row, "interconnect")
    return Cluster(
        nodes=-(-gpus // node),
        devices=min(gpus, node),
        kind=device.name,
        network_bytes_per_s=_network_rate(network, node),
        network=_network_kind(network, text(row, "notes")),
        in_network="NVLS" in network,
    )


def _network_kind(stated: str, notes: str) -> str | None:
    if "Omni-Path" in stated:
        # Notes tell which runs came before the machine was repaired.
        return "omnipath-misbound" if "Before the 02-25 PCIe/NUMA fix" in notes else "omnipath"
    return "efa" if "EFA" in stated or "AWS" in stated else None


def _network_rate(stated: str, node: int) -> float | None:
    """Bytes/s per device between nodes: `8x200 Gb/s` of a node's cards, or `1600 Gb/s ... per node`."""
    cards = re.search(r"(\d+)x(\d+) Gb/s", stated)
    if cards:
        return int(cards[1]) * int(cards[2]) * 1e9 / 8 / node or None
    whole = re.search(r"(\d+) Gb/s", stated)
    if whole and "per node" in stated.lower():
        return int(whole[1]) * 1e9 / 8 / node or None
    return None


# ----------------------------------------------------------------------------------------------------- model and config


def _shape(row: Cells, library: str) -> Shape:
    hidden, heads, layers = (_needed(row, name) for name in ("hidden", "heads", "layers"))
    stated = text(row, "ffn_type")
    activation: Activation = "swiglu" if "swiglu" in stated else "squared-relu" if "squared" in stated else "gelu"
    # Llama and Nemotron have neither biases nor a tied head.
    plain = activation != "gelu"
    vocab = _padded(count(row, "vocab") or 50304, library, count(row, "tp") or 1)
    shape = Shape(
        name=text(row, "model"),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=count(row, "kv_heads") or heads,
        head_dim=hidden // heads,
        ffn=count(row, "ffn_hidden") or 4 * hidden,
        vocab=vocab,
        outputs=vocab,
        sequence=_needed(row, "seq_len"),
        window=SQUAD_TOKENS if library in PACKING and "SFT" in text(row, "model") else None,
        activation=activation,
        norm="rmsnorm" if activation == "swiglu" else "layernorm",
        positions="rotary" if plain else "learned",
        bias=not plain,
        qkv_bias=not plain,
        tied=not plain,
    )
    for problem in shape.problems():
        raise Incomplete(f"no such model: {problem}")
    return shape


def _padded(vocab: int, library: str, tensor: int) -> int:
    """Megatron pads the vocabulary to a multiple of 128 on every rank."""
    multiple = 128 * tensor if library in PADDING else tensor
    return -(-vocab // multiple) * multiple


# Tokens of a question of SQuAD with its text and answer, in round numbers. Recipes for fine-tuning of NeMo and
# Megatron-Bridge pack as many as a sequence has room for (packed_sequence=True), each of which attends to itself alone.
SQUAD_TOKENS = 200
PACKING = ("nemo", "megatron-bridge")

SCHEDULES = {"": "1f1b", "1F1B": "1f1b", "interleaved 1F1B": "interleaved", "ZB-1p": "zero-bubble"}
SCHEDULES |= {"ZB-2p": "zb-2p", "ZB-V": "zbv", "GPipe": "gpipe", "AFAB": "gpipe"}


def _config(row: Cells, shape: Shape, library: str) -> PublishedConfig:
    tensor, pipeline = _axis(row, "tp"), _axis(row, "pp")
    context = count(row, "cp") or 1
    gpus = _needed(row, "gpus")
    data = count(row, "dp") or gpus // (tensor * pipeline * context)
    if data * tensor * pipeline * context != gpus:
        raise Incomplete(f"dp {data} x tp {tensor} x pp {pipeline} x cp {context} is not {gpus} devices")
    if pipeline > shape.layers:
        raise Incomplete(f"pp {pipeline} is more than {shape.layers} layers")
    schedule, chunks = _schedule(row, shape, library, pipeline)
    zero = count(row, "zero_stage") or 0
    if zero > 3:
        raise Incomplete(f"zero_stage {zero} is not known")
    config = PublishedConfig(
        data=data,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        split_sequence=text(row, "sp").lower() == "true",
        schedule=schedule,
        stages_per_rank=chunks,
        # torch's FSDP gathers for every forward pass with either kind of sharding.
        zero=3 if zero == 2 and library.startswith("llm-foundry") else zero,
        shard=_shard(row, data * context),
        microbatch=_microbatch(row, library, pipeline * chunks),
        batch=_needed(row, "global_batch_sequences"),
        sequence=shape.sequence,
        recompute=_recompute(row),
        dtype=_dtype(row),
        layers=_weighed(shape, pipeline * chunks) if library.startswith("nanotron") else None,
    )
    if config.microbatches > MOST_MICROBATCHES:
        raise Incomplete(f"a step of {config.microbatches} microbatches is none that anyone runs")
    return config


def _microbatch(row: Cells, library: str, stages: int) -> int:
    """As stated; torchtitan by default cuts a rank's batch into as many microbatches as there are stages."""
    local = re.search(r"Local batch (\d+)", text(row, "notes"))
    if library.startswith("torchtitan") and stages > 1 and local and not count(row, "microbatch"):
        return max(1, int(local[1]) // stages)
    return _needed(row, "microbatch")


def _shard(row: Cells, replicas: int) -> int | None:
    """Ranks that shards are cut over, where notes say that these are not all."""
    notes = text(row, "notes")
    stated = re.search(r"(?:shard size|shard group =|zero1 group) (\d+)", notes)
    hybrid = re.search(r"^HSDP\.|used HSDP", notes)
    size = int(stated[1]) if stated else (count(row, "gpus_per_node") or 0) if hybrid else 0
    return size if 0 < size < replicas and replicas % size == 0 else None


def _weighed(shape: Shape, stages: int) -> tuple[int, ...]:
    """nanotron weighs blocks and head by their parameters; a stage is full once it has its share of them."""
    block = shape.hidden * (4 * shape.hidden + 3 * shape.ffn)
    share = (shape.layers * block + shape.vocab * shape.hidden) / stages
    each = math.ceil(share / block)
    return tuple(max(0, min(each, shape.layers - each * stage)) for stage in range(stages))


def _axis(row: Cells, name: str) -> int:
    size = count(row, name)
    if size is None:
        raise Incomplete(f"{name} is not stated")
    return max(1, size)


def _schedule(row: Cells, shape: Shape, library: str, pipeline: int) -> tuple[str, int]:
    """The schedule and its stages per rank."""
    if pipeline == 1:
        return "1f1b", 1
    stated = text(row, "schedule")
    schedule = SCHEDULES.get(stated, "interleaved" if "interleaved" in stated else "1f1b")
    chunks = count(row, "virtual_stages")
    each = -(-shape.layers // pipeline)
    if schedule == "zbv":
        return schedule, 2
    if not chunks and library == "nemo":
        schedule, chunks = "interleaved", each  # NeMo's recipes interleave single layers
    elif not chunks:
        chunks = 2 if each % 2 == 0 else each
    if schedule != "interleaved" or chunks == 1:
        return "1f1b" if schedule == "interleaved" else schedule, 1
    return schedule, min(chunks, each)


def _recompute(row: Cells) -> Recompute:
    stated = text(row, "activation_ckpt")
    return "full" if stated == "full" else "selective" if stated == "selective" else "none"


def _dtype(row: Cells) -> str:
    """Of the matrix products of blocks."""
    stated = text(row, "precision").lower()
    if "nvfp4" in stated:
        return "nvfp4"
    if "mx" in stated:
        return "mxfp8"
    if "fp8" in stated or "float8" in stated:
        return "float8"
    return "float16" if "fp16" in stated and "bf16" not in stated else "bfloat16"

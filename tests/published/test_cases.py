"""What a row of published runs leaves open follows from its library; what makes no run is incomplete, never a crash."""

from __future__ import annotations

import csv
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks is no installed package

from benchmarks.published.cases import (
    LIBRARIES,
    case_of,
    holdings_of,
    library_of,
    machine_of,
    memory_config,
    parts_of,
    predict_row,
    seconds_of,
)
from benchmarks.published.libraries import library_named, library_names
from benchmarks.published.recipes import RECIPES, Recipe
from benchmarks.published.rows import COLUMNS, TRAINING, Incomplete
from evenly.hardware.devices import find_device

RUN = {
    "source": "somebody",
    "model": "Llama",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "ffn_hidden": "14336",
    "ffn_type": "swiglu",
    "vocab": "128256",
    "seq_len": "4096",
    "gpu": "H100-SXM-80",
    "gpus": "16",
    "gpus_per_node": "8",
    "dp": "2",
    "zero_stage": "1",
    "tp": "4",
    "sp": "True",
    "pp": "2",
    "cp": "1",
    "microbatch": "1",
    "global_batch_sequences": "32",
    "precision": "bf16 mixed",
    "activation_ckpt": "none",
    "attention": "flash",
}
ROWS = list(csv.DictReader(TRAINING.read_text().splitlines()))


def run(**cells: str) -> dict[str, str]:
    return {**dict.fromkeys(COLUMNS, ""), **RUN, **cells}


def refused(**cells: str) -> str:
    with pytest.raises(Incomplete) as caught:
        predict_row(run(**cells))
    return caught.value.reason


@pytest.mark.parametrize(
    ("cells", "library"),
    [
        ({"source": "megatron-2020-tables"}, "megatron-2020"),
        ({"source": "bloom-prequel"}, "megatron-deepspeed"),
        ({"source": "megatron-2104.04473", "zero_stage": "3"}, "deepspeed-zero3-2021"),
        ({"source": "megatron-2104.04473", "zero_stage": "0"}, "megatron-2021"),
        ({"source": "mpt-llmfoundry", "model": "MPT-7b", "gpus": "8"}, "llm-foundry"),
        ({"source": "mpt-llmfoundry", "model": "MPT-7b", "gpus": "256"}, "llm-foundry-2024"),
        ({"source": "mpt-llmfoundry", "model": "MPT-30b", "gpus": "256"}, "llm-foundry"),
        ({"source": "mpt-llmfoundry", "model": "MPT-7b", "gpus": "256", "gpu": "A100-80"}, "llm-foundry"),
        ({"source": "nvidia-dgxc-of-later"}, "nemo"),
        ({"source": "nvidia-dgxc", "model": "Llama2-70B (MaxText/JAX)"}, "maxtext"),
        ({"attention": "flash (TE fused)", "gpu": "A100-80"}, "nemo"),
        ({"attention": "naive (fused softmax)"}, "megatron-2021"),
        ({"zero_stage": "3", "tp": "1", "pp": "1"}, "torch-fsdp"),
        ({"gpu": "H100-SXM-80"}, "nemo"),
        ({"gpu": "A100-80"}, "megatron-2021"),
    ],
    ids=repr,
)
def test_the_library_follows_from_source_and_facts(cells: dict[str, str], library: str) -> None:
    assert library_of(run(**cells)) == library
    assert library in library_names()


def test_all_libraries_named_here_are_known() -> None:
    assert {*LIBRARIES.values()} <= {*library_names()}
    assert {library_of(row) for row in ROWS} <= {*library_names()}


def test_megatron_pads_the_vocabulary_on_every_rank() -> None:
    def vocab(**cells: str) -> tuple[int, int]:
        shape = case_of(run(vocab="50257", **cells)).shape
        return shape.vocab, shape.outputs

    assert vocab(source="bloom-prequel") == (50688, 50688)  # of 128 x 4
    assert vocab(source="bloom-prequel", tp="1", dp="8") == (50304, 50304)
    assert vocab(source="nanotron-oldbench") == (50260, 50260)  # of 4
    assert case_of(run(vocab="", source="bloom-prequel")).shape.vocab == 50688


def test_the_model_follows_from_its_mlp() -> None:
    llama, gpt, nemotron = (case_of(run(ffn_type=ffn)).shape for ffn in ("swiglu", "", "squared-relu (2 matrices)"))
    assert (llama.activation, llama.norm, llama.positions, llama.tied, llama.bias) == (
        *("swiglu", "rmsnorm", "rotary"),
        *(False, False),
    )
    assert (gpt.activation, gpt.norm, gpt.positions, gpt.tied, gpt.qkv_bias) == (
        *("gelu", "layernorm", "learned"),
        *(True, True),
    )
    assert (nemotron.activation, nemotron.norm, nemotron.tied) == ("squared-relu", "layernorm", False)
    assert case_of(run(kv_heads="", ffn_hidden="")).shape.kv_heads == 32
    assert case_of(run(ffn_hidden="")).shape.ffn == 4 * 4096


@pytest.mark.parametrize(
    ("cells", "schedule"),
    [
        ({"source": "bloom-prequel"}, ("1f1b", 1)),
        ({"schedule": "1F1B", "virtual_stages": "1"}, ("1f1b", 1)),
        ({"schedule": "1F1B (DeepSpeed)", "source": "bloom-prequel"}, ("1f1b", 1)),
        ({"schedule": "interleaved 1F1B", "virtual_stages": "4"}, ("interleaved", 4)),
        ({"schedule": "interleaved 1F1B", "virtual_stages": "1"}, ("1f1b", 1)),
        ({"schedule": "interleaved 1F1B", "source": "bloom-prequel"}, ("interleaved", 2)),
        ({"schedule": "interleaved 1F1B", "source": "bloom-prequel", "layers": "30"}, ("interleaved", 15)),
        ({"schedule": "ZB-V", "source": "zerobubble-2401.10241"}, ("zbv", 2)),
        ({"schedule": "ZB-1p"}, ("1f1b", 1)),
        ({"schedule": "ZB-2p", "source": "zerobubble-2401.10241"}, ("zb-2p", 1)),
        ({"schedule": "GPipe", "source": "bloom-prequel"}, ("gpipe", 1)),
        ({"source": "nvidia-dgxc"}, ("interleaved", 16)),  # NeMo interleaves single layers
        ({"source": "nvidia-dgxc", "virtual_stages": "1"}, ("1f1b", 1)),
        ({"pp": "1", "dp": "4", "schedule": "interleaved 1F1B", "virtual_stages": "4"}, ("1f1b", 1)),
    ],
    ids=repr,
)
def test_schedules_and_their_stages(cells: dict[str, str], schedule: tuple[str, int]) -> None:
    if cells.get("schedule") == "ZB-1p":
        cells, schedule = {**cells, "source": "zerobubble-2401.10241"}, ("zero-bubble", 1)
    config = case_of(run(**cells)).config
    assert (config.schedule, config.stages_per_rank) == schedule


@pytest.mark.parametrize(
    ("stated", "dtype"),
    [
        ("bf16 mixed", "bfloat16"),
        ("fp16 mixed (fp32 master, Adam)", "float16"),
        ("fp16/bf16 mixed (Megatron, fp32 master)", "bfloat16"),
        ("fp8 hybrid (TE) + bf16", "float8"),
        ("FP8-MX", "mxfp8"),
        ("NVFP4", "nvfp4"),
        ("", "bfloat16"),
    ],
)
def test_precisions(stated: str, dtype: str) -> None:
    assert case_of(run(precision=stated)).config.dtype == dtype


def test_axes_recomputation_and_sharding() -> None:
    config = case_of(run(activation_ckpt="full")).config
    assert (config.data, config.tensor, config.pipeline, config.context) == (2, 4, 2, 1)
    assert (config.split_sequence, config.zero, config.recompute) == (True, 1, "full")
    assert case_of(run(dp="")).config.data == 2
    assert case_of(run(cp="2", dp="")).config.context == 2
    sharded = run(source="mpt-llmfoundry", zero_stage="2", tp="1", pp="1", dp="16")
    assert case_of(sharded).config.zero == 3  # torch's FSDP gathers anew


def test_notes_say_how_many_ranks_shards_are_cut_over() -> None:
    wide = {"tp": "1", "pp": "1", "dp": "16", "zero_stage": "3"}
    assert case_of(run(**wide)).config.shard is None
    assert case_of(run(**wide, notes="JAX/XLA, FSDP shard size 4 (rest replicated).")).config.shard == 4
    assert case_of(run(**wide, notes="FSDP shard size 16.")).config.shard is None
    assert case_of(run(**wide, notes="7B used HSDP (shard in node).")).config.shard == 8
    assert case_of(run(**wide, notes="FSDP. HSDP = ZeRO-3 in node.")).config.shard is None


def test_nanotron_fills_stages_by_parameters() -> None:
    layers = case_of(run(source="nanotron-oldbench", layers="30", vocab="128256")).config.layers
    assert layers is not None and sum(layers) == 30 and layers[0] > layers[1]
    back = case_of(run(source="nanotron-oldbench", schedule="ZB-V")).config.layers
    assert back is not None and len(back) == 4 and sum(back) == 32


def test_the_cluster_follows_from_device_and_network() -> None:
    jean_zay = "NVLink; 4x100 Gb/s Omni-Path per node (Jean Zay)"
    cluster = case_of(run(interconnect=jean_zay, gpu="A100-80 (whatever)")).cluster
    assert (cluster.nodes, cluster.devices, cluster.kind) == (2, 8, "A100-80")
    assert (cluster.network, cluster.network_bytes_per_s) == ("omnipath", 4 * 100e9 / 8 / 8)
    early = case_of(run(interconnect=jean_zay, notes="Before the 02-25 PCIe/NUMA fix (1-5% slower).")).cluster
    assert early.network == "omnipath-misbound" and early.network_bytes_per_s == cluster.network_bytes_per_s
    assert case_of(run(interconnect="1600 Gb/s RoCE per node")).cluster.network_bytes_per_s == 1600e9 / 8 / 8
    aws = case_of(run(interconnect="AWS p5: NVLink4; 32x100 Gb/s EFA per node")).cluster
    assert (aws.network, aws.network_bytes_per_s) == ("efa", 32 * 100e9 / 8 / 8)
    assert case_of(run(interconnect="NVLink; 0 Gb/s per node")).cluster.network_bytes_per_s is None
    odd = case_of(run(gpus="12", dp="3", tp="4", pp="1")).cluster
    assert (odd.nodes, odd.devices) == (2, 8)
    assert case_of(run(gpus="4", dp="1", tp="4", pp="1")).cluster.size == 4


def test_dropout_is_drawn_where_the_library_does() -> None:
    kept = {}
    for source, model in (("nvidia-dgxc", "Llama3-8B"), ("nvidia-dgxc", "GPT3-175B")):
        case = case_of(run(source=source, model=model))
        kept[model] = parts_of(case, library_named(case.library)).blocks[0].saved_bytes["none"]
    assert kept["GPT3-175B"] > kept["Llama3-8B"]


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"layers": ""}, "layers is not stated"),
        ({"microbatch": ""}, "microbatch is not stated"),
        ({"tp": ""}, "tp is not stated"),
        ({"seq_len": "long"}, "seq_len is 'long', not a number"),
        ({"hidden": "nan"}, "hidden is 'nan', not a whole number"),
        ({"gpus": "inf"}, "gpus is 'inf'"),
        ({"gpus": "7.5"}, "not a whole number"),
        ({"gpu": "abacus"}, "the device 'abacus' is not known"),
        ({"gpus": "24"}, "dp 2 x tp 4 x pp 2 x cp 1 is not 24 devices"),
        ({"kv_heads": "5"}, "heads=32 cannot be shared evenly by kv_heads=5"),
        ({"layers": "10000000"}, "no such model"),
        ({"heads": "8192"}, "no such model"),
        ({"layers": "1"}, "pp 2 is more than 1 layers"),
        ({"zero_stage": "4"}, "zero_stage 4 is not known"),
        ({"global_batch_sequences": "1e12"}, "is none that anyone runs"),
    ],
    ids=repr,
)
def test_what_makes_no_run_is_incomplete(cells: dict[str, str], words: str) -> None:
    assert words in refused(**cells)


CELLS = ("", "0", "1", "2", "3", "7", "16", "128", "1e9", "-4", "2.5", "nan", "inf", "text", "True", "1F1B", "GPipe")
CELLS += ("interleaved 1F1B", "ZB-V", "ZB-2p", "full", "selective", "fp8", "0x0 Gb/s", "é")


def test_odd_cells_never_crash() -> None:
    draw = random.Random(7)
    columns = [name for name in COLUMNS if name not in ("id", "source_ref")]
    predicted = 0
    for _ in range(3000):
        row = dict(draw.choice(ROWS))
        for name in draw.sample(columns, draw.choice((1, 2, 4))):
            row[name] = draw.choice(CELLS)
        if row["pp"] not in ("", "1", "2", "3", "16"):
            row["pp"] = "2"
        try:
            found = predict_row(row)
        except Incomplete:
            continue
        predicted += 1
        assert found.step_s is not None and 0 < found.step_s < float("inf"), row
        assert found.unclear or (found.peak_bytes is not None and 0 < found.peak_bytes < float("inf")), row
    assert predicted > 400


def test_columns_may_be_missing() -> None:
    with pytest.raises(Incomplete):
        predict_row({})
    few = {name: RUN[name] for name in RUN if name not in ("vocab", "kv_heads", "cp", "attention", "gpus_per_node")}
    assert (predict_row(few).step_s or 0) > 0


@pytest.mark.parametrize(
    ("stated", "kind", "gib", "share"),
    [
        ("H100-96GB-HBM2e-500W", "H100-80", 95.04, 0.894),
        ("A100-64GB", "A100-80", 63.04, 1.0),
        ("A100-40 (DGX A100)", "A100-40", 39.4, 1.0),
        ("MI300X-192GB", "MI300X", 191.98, 1.0),
        ("L40S 48GB", "L40S", 44.4, 1.0),
        ("H100 SXM5 80GB 350W", "H100-80", 79.11, 0.794),
        ("Blackwell SM100 ~184 GiB (B200/GB200 class)", "GB200", 184.31, 1.0),
        ("RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000", 94.97, 1.0),
    ],
)
def test_the_device_is_what_the_source_calls_it(stated: str, kind: str, gib: float, share: float) -> None:
    device = case_of(run(gpu=stated)).cluster.device
    assert device.kind == kind and device.memory_bytes / 2**30 == pytest.approx(gib, abs=0.01)
    assert device.flops["bfloat16"] / find_device(kind).flops["bfloat16"] == pytest.approx(share, abs=0.001)


def test_a_device_that_nobody_knows() -> None:
    assert refused(gpu="Abacus 9000 80GB") == "the device 'Abacus 9000 80GB' is not known"


BRIDGE = {
    "source": "megatron-bridge",
    "model": "Llama3-70B",
    "params_b": "70.55",
    "gpu": "GB200",
    "gpus": "64",
    "gpus_per_node": "4",
    "dp": "64",
    "tp": "1",
    "pp": "1",
    "zero_stage": "3",
    "microbatch": "2",
    "global_batch_sequences": "128",
    "precision": "FP8-CS",
    "activation_ckpt": "",
}


def test_a_recipe_says_what_its_table_leaves_out() -> None:
    case = case_of(run(**BRIDGE))
    assert case.recipe is not None and case.config.offloaded == 40
    assert case_of(run(**BRIDGE | {"gpu": "GB300"})).config.offloaded == 20
    assert case_of(run(**BRIDGE | {"precision": "BF16", "microbatch": "1"})).config.offloaded == 20
    stays = predict_row(run(**BRIDGE | {"microbatch": "1", "activation_ckpt": "none"})).peak_bytes
    gone = predict_row(run(**BRIDGE | {"microbatch": "1", "precision": "BF16", "activation_ckpt": "none"})).peak_bytes
    assert stays is not None and gone is not None and gone < stays


@pytest.mark.parametrize("cells", [{"microbatch": "4"}, {"tp": "2", "dp": "32"}, {"zero_stage": "1"}], ids=repr)
def test_memory_is_not_predicted_where_recomputation_is_unclear(cells: dict[str, str]) -> None:
    found = predict_row(run(**BRIDGE | cells))
    assert found.peak_bytes is found.limit_bytes is None and found.step_s is not None
    assert found.unclear == "memory: recomputation is not stated, nor is the plan that of a recipe"
    clear = predict_row(run(**BRIDGE | cells | {"activation_ckpt": "full"}))
    assert clear.peak_bytes and not clear.unclear and clear.step_s is not None


TITAN = {"source": "torchtitan", "tp": "1", "pp": "1", "dp": "16", "zero_stage": "3", "activation_ckpt": "selective"}


def test_torchtitan_is_compiled_or_not_and_its_loss_since_2025() -> None:
    names = [case_of(run(**TITAN, compile=compiled)).library for compiled in ("", "False", "True")]
    assert names == ["torchtitan", "torchtitan", "torchtitan-compiled"]
    by_file = "compile not stated (toml: true)."
    names = [case_of(run(**TITAN, compile=compiled, notes=by_file)).library for compiled in ("", "False")]
    assert names == ["torchtitan-compiled", "torchtitan"]

    def logit(**cells: str) -> float:
        case = case_of(run(**TITAN, **cells))
        return holdings_of(case, library_named(case.library)).logit

    assert logit(compile="False") == logit(compile="True", source_ref="llama3_h100_202412.md") == 16
    assert logit(compile="True", source_ref="docs of 2025") == 8


def test_shards_of_torchtitan_are_whole_within_a_pipeline() -> None:
    cells = TITAN | {"pp": "2", "dp": "8", "zero_stage": "2"}
    case = case_of(run(**cells))
    assert memory_config(case).zero == 3 and case.config.zero == 2
    whole = holdings_of(case, library_named(case.library))
    assert whole.units == case.shape.layers and whole.gathered == 6.0
    assert memory_config(case_of(run(**TITAN))) == case_of(run(**TITAN)).config


def test_torchtitan_cuts_a_local_batch_into_as_many_microbatches_as_stages() -> None:
    cells = TITAN | {"pp": "4", "dp": "4", "microbatch": "", "notes": "Local batch 32.", "schedule": "1F1B"}
    assert case_of(run(**cells, virtual_stages="1")).config.microbatch == 8
    assert refused(**cells | {"source": "somebody"}) == "microbatch is not stated"


def test_a_float32_sum_of_gradients_takes_four_bytes_more() -> None:
    plain, summed = (
        case_of(run(source="bloom-prequel", notes=notes))
        for notes in ("", "BF16 optimizer with fp32 grad accumulation")
    )
    library = library_named(plain.library)
    assert holdings_of(summed, library).gradients - holdings_of(plain, library).gradients == 4


def test_internevo_sends_what_it_updated_rank_by_rank() -> None:
    library = library_named("internevo")
    for notes, shards in (("zero1 shard group = 2", 2), ("zero1 group 2", 2), ("", 4)):
        case = case_of(run(source="internevo", notes=notes, dp="4", pp="1"))
        parts, together = parts_of(case, library), machine_of(case, replace(library, turn_s=0.0))
        more = seconds_of(case, parts, machine_of(case, library)) - seconds_of(case, parts, together)
        assert case.config.shards == shards and more == pytest.approx(shards * library.turn_s)


def test_what_is_gathered_in_8_bits_is_sent_in_8_bits() -> None:
    library = library_named("torchtitan")
    machines = [
        machine_of(case_of(run(**TITAN, precision=stated)), library)
        for stated in ("float8 tensorwise", "float8 tensorwise linears + float8 all-gather", "bf16, no all-gather")
    ]
    assert [machine.library.weight_bytes for machine in machines] == [2.0, 1.0, 2.0]


@pytest.mark.parametrize(("stated", "size"), [("BF16", 2.0), ("FP8-CS", 1.0), ("FP8-MX", 2.0), ("NVFP4", 2.0)])
def test_megatron_gathers_weights_in_8_bits_where_one_scale_is_of_a_whole_tensor(stated: str, size: float) -> None:
    case = case_of(run(**BRIDGE | {"precision": stated}))
    assert machine_of(case, library_named(case.library)).library.weight_bytes == size


def recipe_row(size: int, kind: str, recipe: Recipe, *, wide: bool) -> dict[str, str]:
    """A run of a recipe, on as many devices as it is shipped for."""
    shape = next(row for row in ROWS if row["source"] == "megatron-bridge" and row["params_b"].startswith(f"{size}."))
    devices = {8: 8, 70: 64, 405: 128 if recipe.sharded else 1024 if kind == "H100-80" else 256}[size]
    data = devices // (recipe.tensor * recipe.pipeline * recipe.context)
    cells = {"tp": recipe.tensor, "pp": recipe.pipeline, "cp": recipe.context, "dp": data, "gpus": devices}
    cells |= {"microbatch": recipe.microbatch, "global_batch_sequences": 16 * data, "gpus_per_node": ""}
    cells |= {"zero_stage": 3 if recipe.sharded else 1, "virtual_stages": 5 if size == 70 else 8, "gpu": kind}
    cells |= {"precision": "BF16" if wide else "FP8-CS", "schedule": "interleaved 1F1B", "notes": ""}
    return {**shape, **{name: str(value) for name, value in cells.items()}}


def test_recipes_fit_on_the_devices_that_they_are_shipped_for() -> None:
    too_large: set[tuple[int, str]] = set()
    for (size, kind, wide), recipes in RECIPES.items():
        for recipe in recipes:
            found = predict_row(recipe_row(size, kind, recipe, wide=wide))
            assert found.peak_bytes is not None and found.limit_bytes is not None
            if found.peak_bytes > found.limit_bytes:
                too_large.add((size, kind))
    assert too_large == {(405, "B300")}  # with a tensor axis of 2 and no context axis


def test_samples_packed_for_fine_tuning_attend_to_themselves() -> None:
    def operations(**cells: str) -> float:
        case = case_of(run(**cells))
        block = parts_of(case, library_named(case.library)).blocks[0]
        return sum(work.flops for work in block.forward if work.kind == "attention")

    whole, packed = (operations(source="nvidia-dgxc", model=model) for model in ("Llama3-8B", "Llama3-8B SFT"))
    assert packed < 0.1 * whole
    assert operations(source="internevo", model="Llama3-8B SFT") == whole

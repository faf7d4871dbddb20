"""Speeds of devices and libraries: complete, and replaced by what was measured."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

import pytest
from predicted import predict_plan

from evenly.comm.shared_memory import MOST_RANKS, PLACE_BYTES, SETS, TYPES
from evenly.hardware.cluster import Cluster, Rates
from evenly.hardware.cluster_text import parse_cluster
from evenly.hardware.devices import device_names, find_device
from evenly.job import Precision
from evenly.model.parts import OpCost
from evenly.plan import parse_plan
from evenly.planner.known import find_shape
from evenly.planner.request import PlanRequest
from evenly.planner.shapes import ShapeSource
from evenly.planner.speeds import SHARED_TYPES, own_library, shipped, speeds_of, speeds_of_device

PRECISIONS = ("float64", "float32", "bfloat16", "float16", "float8", "mxfp8", "nvfp4")
EVENLY = own_library("bfloat16", bitwise=False, on_cpu=False)
H100 = Cluster(1, 8, "H100-80")
PRODUCT = OpCost(kind="matmul", flops=2.0 * 4096**3, moved_bytes=6.0 * 4096**2, rows=4096, inner=4096, columns=4096)
PRODUCT = replace(PRODUCT, dtype="bfloat16")


@pytest.mark.parametrize("name", device_names())
def test_every_device_has_a_speed_for_every_precision_and_kernel(name: str) -> None:
    device = find_device(name)
    speeds = speeds_of_device(device)
    rates = [*(speeds.matmul[dtype] for dtype in PRECISIONS), *speeds.attention.values()]
    assert all(isfinite(rate) and rate > 0 for rate in (*rates, speeds.bandwidth))
    assert speeds.bandwidth < device.bandwidth
    peak = max(device.flops.values())
    assert all(rate < 1.1 * peak for rate in rates)  # V100's fit is above the sheet: bursts of its clock
    assert speeds.matmul["bfloat16"] <= speeds.matmul["float8"]


def test_fitted_kinds_are_known_and_stand_once() -> None:
    kinds = [kind for facts in shipped()["devices"].values() for kind in facts["kinds"]]
    assert len(kinds) == len({*kinds}) and {*kinds} <= {*device_names()}


def test_what_was_measured_of_a_device_wins() -> None:
    rates = Rates(matmul={"bfloat16": {1024: 3e14, 4096: 6e14}, "float32": {}}, memory=2e12)
    plain, measured = speeds_of(H100), speeds_of(replace(H100, rates=rates))
    assert (measured.matmul["bfloat16"], measured.bandwidth) == (6e14, 2e12)
    assert measured.matmul["float32"] == plain.matmul["float32"]
    assert measured.attention == plain.attention and plain.bandwidth != 2e12  # float16 is as fast as it was


def test_of_what_was_measured_the_largest_products_count_and_attention_is_as_much_faster() -> None:
    half = {dtype: {128: 9e15, 4096: 2 * speeds_of(H100).matmul[dtype]} for dtype in ("bfloat16", "float16")}
    plain, measured = speeds_of(H100), speeds_of(replace(H100, rates=Rates(matmul=half)))
    assert measured.matmul["bfloat16"] == 2 * plain.matmul["bfloat16"]
    assert measured.attention == pytest.approx({name: 2 * rate for name, rate in plain.attention.items()})


def test_a_device_that_nobody_fitted_reaches_the_share_of_others() -> None:
    device = find_device("RTX 4090")
    shares = shipped()["shares"]["matmul"]
    assert speeds_of_device(device).matmul["float32"] == pytest.approx(device.flops["float32"] * shares["float32"])


def test_what_a_device_has_no_units_for_is_done_in_the_next_type() -> None:
    volta, ampere, ada = (speeds_of_device(find_device(name)).matmul for name in ("V100", "A100", "L40S"))
    assert volta["bfloat16"] == volta["float32"] < volta["float16"] == volta["float8"]
    assert ampere["float8"] == ampere["nvfp4"] == ampere["bfloat16"] == ampere["float16"]
    assert ada["float64"] == pytest.approx(ada["float32"] / 32)


def test_narrow_and_uneven_products_take_longer() -> None:
    speeds, library = speeds_of(H100), EVENLY

    def per_flop(**sizes: int) -> float:
        one = replace(PRODUCT, **sizes)
        flops = 2.0 * one.rows * one.inner * one.columns
        return (speeds.seconds(replace(one, flops=flops, moved_bytes=0.0), library) - speeds.start_s) / flops

    assert per_flop(inner=64) > per_flop(inner=128) > per_flop()
    assert per_flop(columns=4096 + 1) > 2 * per_flop() > per_flop(columns=4096 + 8) > per_flop(columns=4096 + 32)
    assert per_flop(columns=4096 + 32) > per_flop(columns=4096 + 64)
    # How many tokens there are is no width of a matrix.
    assert per_flop(rows=4097) == pytest.approx(per_flop(), rel=1e-3)
    assert speeds.misaligned(replace(PRODUCT, inner=4097, of_weights=True), library) == 1


def test_a_cpu_starts_its_operations_itself_and_minds_narrow_products_less() -> None:
    cpu, others = speeds_of_device(find_device("cpu")), speeds_of(H100)
    assert cpu.narrow < others.narrow and cpu.call_s > others.call_s == 0
    assert cpu.traffic == others.traffic
    library = own_library("float32", bitwise=False, on_cpu=True)
    assert library.host_s == 0 < EVENLY.host_s
    assert cpu.misaligned(replace(PRODUCT, columns=4097), library) == 1  # nor odd ones


def test_memory_that_cpu_ranks_of_one_machine_share_is_counted() -> None:
    """Each rank's places in it, as `comm.shared_memory` makes them for the tensor axis of a world on one node."""

    def counted(text: str, cluster: str = "8xcpu", precision: Precision = "float32") -> float:
        source, plan = ShapeSource(find_shape("gpt2")), parse_plan(f"{text} microbatch=1").complete(precision)
        request = PlanRequest(source=source, cluster=parse_cluster(cluster), batch=4)
        return predict_plan(request, plan).memory[0].context

    assert counted("data=2 tensor=2") == SETS * PLACE_BYTES == counted(f"data=1 tensor={MOST_RANKS}", "16xcpu")
    assert (
        counted("data=2")
        == counted("data=1 tensor=2", precision="bfloat16")
        == counted("data=2 tensor=2", "2x2xcpu")
        == 0
    )
    assert counted("data=1 tensor=16", "16xcpu") == 0 and counted("data=1 tensor=2", "8xA100") == counted(
        "data=2", "8xA100"
    )
    assert {f"torch.{name}" for name in SHARED_TYPES} == {*map(str, TYPES)}


def test_a_slow_core_takes_as_much_longer_to_start_operations() -> None:
    cpu = Cluster(1, 2, "cpu")
    plain = speeds_of(cpu)
    half = speeds_of(replace(cpu, rates=Rates(small=plain.small / 2)))
    assert plain.small > 0 and (half.start_s, half.call_s) == (2 * plain.start_s, 2 * plain.call_s)
    assert speeds_of(replace(H100, rates=Rates(small=1.0))).start_s == speeds_of(H100).start_s


def test_a_convolution_on_a_cpu_also_takes_what_its_kernels_copy() -> None:
    cpu, gpu = speeds_of_device(find_device("cpu")), speeds_of(H100)
    large = replace(PRODUCT, kind="convolution", rows=0, inner=0, columns=0, dtype="float32")
    few = replace(large, flops=large.flops / 1000)  # of few images: what it reads are weights
    for speeds in (cpu, gpu):
        more = replace(few, moved_bytes=2 * few.moved_bytes)
        assert speeds.seconds(more, EVENLY) > 1.5 * speeds.seconds(few, EVENLY)
        assert speeds.seconds(large, EVENLY) > speeds.seconds(few, EVENLY) > speeds.seconds(large, EVENLY) / 1000
    assert cpu.relayout * few.moved_bytes / cpu.bandwidth > few.flops / cpu.matmul["float32"]
    assert cpu.relayout > 1 > gpu.relayout == gpu.traffic


def test_more_takes_longer_and_as_often_as_it_is_done() -> None:
    speeds, library = speeds_of(H100), EVENLY
    once = speeds.seconds(PRODUCT, library)
    assert speeds.seconds(replace(PRODUCT, times=3), library) == pytest.approx(3 * once)
    assert speeds.seconds(replace(PRODUCT, flops=2 * PRODUCT.flops), library) > once
    assert speeds.seconds(replace(PRODUCT, moved_bytes=2 * PRODUCT.moved_bytes), library) > once
    empty = OpCost(kind="memory")
    assert speeds.seconds(empty, library) == speeds.start_s


def test_attention_without_tensor_cores_is_slower() -> None:
    speeds, library = speeds_of(H100), EVENLY

    def seconds(dtype: str) -> float:
        return speeds.seconds(OpCost(kind="attention", flops=1e15, dtype=dtype), library)

    assert seconds("float64") > seconds("float32") > seconds("bfloat16") == seconds("float16") == seconds("")


def test_operations_that_are_counted_as_they_run_pass_over_memory_once() -> None:
    fused, speeds = OpCost(kind="memory", moved_bytes=1e9), replace(speeds_of(H100), start_s=0.0)
    run = replace(fused, as_run=True)
    assert speeds.seconds(run, EVENLY) == 1e9 / speeds.bandwidth
    assert speeds.seconds(fused, EVENLY) == EVENLY.passes * 1e9 / speeds.bandwidth > speeds.seconds(run, EVENLY)
    on_cpu = own_library("float32", bitwise=False, on_cpu=True)
    assert speeds.seconds(run, on_cpu) == speeds.seconds(fused, on_cpu)


def test_gpus_leave_out_what_causal_attention_does_not_look_at() -> None:
    every, speeds = OpCost(kind="attention", flops=1e12, dtype="bfloat16"), replace(speeds_of(H100), start_s=0.0)
    causal, on_cpu = replace(every, looked_at=0.5), own_library("float32", bitwise=False, on_cpu=True)
    assert speeds.seconds(causal, EVENLY) == speeds.seconds(every, EVENLY) / 2
    assert speeds.seconds(causal, on_cpu) == speeds.seconds(every, on_cpu)


def test_tiles_that_leave_multiprocessors_idle_cost_time() -> None:
    speeds = replace(speeds_of_device(find_device("A100-80")), idle=0.5)
    assert speeds.processors == 108

    def product(rows: int, columns: int) -> OpCost:
        return replace(PRODUCT, rows=rows, columns=columns, flops=2.0 * rows * columns * PRODUCT.inner)

    # 108 tiles of 256 x 128 fill one round; one more row of tiles needs a second round, mostly idle.
    full, over = product(12 * 256, 9 * 128), product(13 * 256, 9 * 128)
    assert speeds.waves(full) == 1.0
    assert speeds.waves(over) == pytest.approx(
        1 + 0.5 * (1.4 * 9 * 108 * 64 * 64 / (3328 * 1152) - 1)
    )  # small tiles waste less
    assert 1 <= speeds.waves(product(64 * 256, 64 * 128)) < 1.02
    assert speeds.waves(replace(over, flops=8 * over.flops)) == 1.0  # eight heads at once fill each other's gaps
    assert replace(speeds, processors=0).waves(over) == 1.0


def test_a_variant_is_as_much_slower_as_its_peak() -> None:
    kind, variant = (speeds_of_device(find_device(text)) for text in ("A100", "A100:clock=705MHz,bandwidth=1TB/s"))
    assert variant.matmul["bfloat16"] == pytest.approx(kind.matmul["bfloat16"] / 2)
    assert variant.attention["fa2"] == pytest.approx(kind.attention["fa2"] / 2)
    assert variant.bandwidth / 1e12 == pytest.approx(kind.bandwidth / find_device("A100").bandwidth)

"""The time of a step: what each decision does to it, and that its causes add up."""

from __future__ import annotations

from dataclasses import astuple, replace
from math import inf

import pytest

from evenly.comm.shared_memory import TYPES
from evenly.hardware.cluster import Cluster, Link
from evenly.hardware.devices import device_names
from evenly.hardware.network import NARROW_ON_CPUS, LinkedRanks, seconds
from evenly.model.parts import Recompute
from evenly.planner.known import find_shape
from evenly.planner.prediction import TimeByCause
from evenly.planner.shape import parameters
from evenly.planner.shapes import split_of
from evenly.planner.speeds import host_bandwidth, own_library, speeds_of
from evenly.planner.time import (
    Machine,
    StageTime,
    _reduction_tail,  # pyright: ignore[reportPrivateUsage]
    even_counts,
    message_seconds,
    overlapped,
    stage_times,
    step_time,
)
from evenly.planner.training_config import TrainingConfig
from evenly.planner.transformer import Split, transformer_parts

LLAMA = find_shape("llama-3.1-8b")
NODE = Cluster(1, 8, "H100-80")
CALM = {"jitter": 0.0, "host_s": 0.0, "tensor_host_s": 0.0}


def machine(cluster: Cluster = NODE, **facts: object) -> Machine:
    library = own_library("bfloat16", bitwise=False, on_cpu=False)
    return Machine(cluster, speeds_of(cluster), replace(library, **facts))  # pyright: ignore[reportArgumentType]


def step(config: TrainingConfig, on: Machine | None = None, model: str = "llama-3.1-8b") -> TimeByCause:
    return both(config, on, model)[0]


def both(config: TrainingConfig, on: Machine | None = None, model: str = "llama-3.1-8b") -> tuple[TimeByCause, float]:
    on, config = on or machine(), replace(config, sequence=2048)
    return step_time(transformer_parts(find_shape(model), split_of(config), on.library.kernels), config, on)


def computing(one: TimeByCause) -> float:
    return one.matmul + one.attention + one.memory


CONFIGS = [
    TrainingConfig(batch=8),
    TrainingConfig(data=8, zero=3, batch=16, recompute="selective"),
    TrainingConfig(data=8, zero=3, shard=4, batch=16),
    TrainingConfig(data=4, tensor=2, zero=1, batch=16, recompute="full", split_sequence=True),
    TrainingConfig(data=2, pipeline=4, batch=16, schedule="gpipe"),
    TrainingConfig(data=2, pipeline=4, batch=16, schedule="zero-bubble"),
    TrainingConfig(pipeline=8, batch=32, schedule="interleaved", stages_per_rank=2),
    TrainingConfig(pipeline=8, batch=30, schedule="zbv", stages_per_rank=2),
    TrainingConfig(pipeline=4, tensor=2, batch=11, schedule="interleaved", stages_per_rank=2),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_causes_add_up_to_the_step_and_none_is_negative(config: TrainingConfig) -> None:
    time, bubble = both(config)
    assert time.step_s == pytest.approx(sum(astuple(time)))
    assert min(astuple(time)) >= 0 and 0 < time.step_s < inf
    assert 0 <= bubble < 1 and (bubble > 0) == (config.pipeline > 1)


@pytest.mark.parametrize("device", device_names())
def test_every_device_takes_a_finite_time(device: str) -> None:
    on = machine(Cluster(2, 4, device))
    for dtype in ("float32", "bfloat16", "float8"):
        time = step(TrainingConfig(data=4, tensor=2, zero=1, batch=4, dtype=dtype), on, "gpt2")
        assert min(astuple(time)) >= 0 and 0 < time.step_s < inf


def test_a_backward_pass_hides_no_more_of_the_reduction_than_it_takes() -> None:
    config = TrainingConfig(data=16, batch=16)
    fast, slow = Cluster(2, 8, "H100-80"), Cluster(2, 8, "H100-80", network_bytes_per_s=1e6)
    near, far = (step(config, machine(cluster, **CALM)) for cluster in (fast, slow))
    talks = [seconds("all_reduce", parameters(LLAMA) * 2.0 * 2, LinkedRanks(16, 8), c) for c in (fast, slow)]
    assert near.data == pytest.approx(0.3 * talks[0], rel=0.2)
    assert talks[1] - computing(far) < far.data < talks[1] and talks[1] > 100 * computing(far)


def test_computing_grows_with_the_batch_and_large_microbatches_are_not_slower() -> None:
    small, more, large = (
        step(TrainingConfig(batch=b, microbatch=m), machine(**CALM)) for b, m in ((4, 1), (8, 1), (8, 4))
    )
    assert computing(more) == pytest.approx(2 * computing(small))
    assert computing(small) < computing(large) < computing(more)


def test_recomputing_everything_adds_a_forward_pass_of_the_blocks() -> None:
    on, config = machine(**CALM), TrainingConfig(batch=2)
    times: dict[Recompute, TimeByCause] = {
        how: step(replace(config, recompute=how), on) for how in ("none", "selective", "full")
    }
    parts = transformer_parts(LLAMA, Split(samples=1, sequence=2048), on.library.kernels)
    forward = sum(on.speeds.seconds(work, on.library) for work in parts.blocks[0].forward)
    assert times["full"].recompute == pytest.approx(2 * LLAMA.layers * forward)
    assert 0 == times["none"].recompute < times["selective"].recompute < times["full"].recompute / 2
    assert {computing(time) for time in times.values()} == {computing(times["none"])}


def test_recomputing_repeats_the_sums_of_the_tensor_axis() -> None:
    def again(how: Recompute, **facts: object) -> float:
        return step(TrainingConfig(tensor=8, batch=1, recompute=how), machine(**CALM, **facts)).recompute

    for how in ("selective", "full"):
        assert again(how, tensor_hidden=1.0) < again(how, tensor_hidden=0.0)
    assert again("none", tensor_hidden=0.0) == 0


def test_the_tensor_axis_shares_products_and_talks() -> None:
    one, many = (step(TrainingConfig(tensor=size, batch=8), machine(**CALM)) for size in (1, 8))
    assert one.matmul / 8 < many.matmul < one.matmul / 4
    assert one.tensor == 0 < many.tensor
    assert step(TrainingConfig(tensor=8, batch=8), machine(tensor_hidden=0.5)).tensor < many.tensor
    across = step(TrainingConfig(tensor=8, batch=8), machine(Cluster(2, 4, "H100-80"), **CALM))
    assert across.tensor > 1.3 * many.tensor


def test_zero_3_gathers_beside_computing_or_before_it() -> None:
    configs = [TrainingConfig(data=8, zero=zero, batch=8) for zero in (0, 3)]
    plain, sharded = (step(config, machine(**CALM)) for config in configs)
    assert sharded.data > 0 and computing(sharded) == pytest.approx(computing(plain))
    serial = step(configs[1], machine(gather="serial", **CALM))
    assert serial.data > sharded.data
    slower = step(configs[1], machine(gather="serial", gather_share=0.5, **CALM))
    assert slower.data > 1.5 * serial.data
    assert sharded.optimizer == pytest.approx(plain.optimizer / 8)


def test_zero_3_gathers_for_every_microbatch_and_data_parallelism_reduces_once() -> None:
    def data(zero: int, batch: int, **facts: object) -> float:
        return step(TrainingConfig(data=8, zero=zero, batch=batch), machine(**CALM, **facts)).data

    assert data(3, 32) == pytest.approx(4 * data(3, 8))
    assert data(0, 32) == pytest.approx(data(0, 8)) and data(1, 32) == pytest.approx(data(1, 8))
    assert data(2, 32, reduces_each=False) == pytest.approx(data(2, 8))
    assert data(2, 8) < data(2, 16) < data(2, 32)
    assert data(2, 8) == pytest.approx(data(1, 8))


def test_what_zero_2_reduces_of_each_microbatch_hides_under_the_next_one() -> None:
    on, slow = machine(**CALM), machine(replace(NODE, links={("reduce_scatter", 8): Link(0.0, 1e-7)}), **CALM)

    def longer(on: Machine, zero: int) -> float:
        few, many = (step(TrainingConfig(data=8, zero=zero, batch=batch), on).step_s for batch in (8, 32))
        return many - few

    talk = seconds("reduce_scatter", parameters(LLAMA) * slow.library.gradient_bytes, LinkedRanks(8, 8), slow.cluster)
    assert longer(on, 1) < longer(on, 2) < 1.3 * longer(on, 1)
    assert longer(slow, 2) == pytest.approx(3 * talk, rel=0.05)
    assert talk > 2 * longer(slow, 1)


def test_weights_that_are_waited_for_are_not_hidden() -> None:
    config = TrainingConfig(data=8, zero=1, batch=8)
    hidden, waited = (step(config, machine(**CALM, weights_wait=wait, data_hidden=1.0)).data for wait in (False, True))
    gathered = parameters(LLAMA) * machine().library.weight_bytes
    assert hidden == 0 and waited == pytest.approx(seconds("all_gather", gathered, LinkedRanks(8, 8), NODE))


def test_weights_that_stay_gathered_are_gathered_once() -> None:
    config = TrainingConfig(data=8, zero=3, batch=8)
    block = transformer_parts(LLAMA, split_of(config), machine().library.kernels).blocks[0].parameters
    size = block * machine().library.weight_bytes

    def data(whole_bytes: float) -> float:
        return step(config, machine(**CALM, gather="serial", data_hidden=1.0, whole_bytes=whole_bytes)).data

    once = seconds("all_gather", size, LinkedRanks(8, 8), NODE)
    one, two, three = data(size), data(2.5 * size), data(3 * size)
    assert one - two == pytest.approx(once) == pytest.approx(two - three)
    assert data(0) - one > once  # with what is around blocks


def test_a_split_backward_pass_may_take_longer() -> None:
    def longer(schedule: str) -> float:
        config = TrainingConfig(pipeline=4, batch=16, schedule=schedule)
        plain, split = (step(config, machine(**CALM, split_backward=factor)).step_s for factor in (1.0, 1.5))
        return split / plain

    assert longer("1f1b") == 1.0 and 1.2 < longer("zero-bubble") < 1.4


def test_microbatches_of_the_rank_with_most_count() -> None:
    even = TrainingConfig(data=8, zero=3, batch=16)
    more = step(replace(even, loads=((1.0, 2.0, 3.0), (2.0, 2.0, 2.0))), machine(**CALM))
    assert even.microbatches == 2
    assert (more.matmul, more.data) == pytest.approx(
        (1.5 * step(even, machine(**CALM)).matmul, 1.5 * step(even, machine(**CALM)).data)
    )


def test_what_is_sharded_within_a_node_is_gathered_there_and_added_up_across() -> None:
    on = machine(Cluster(8, 8, "A100-80"), **CALM, data_hidden=0.0)
    whole, hybrid = (TrainingConfig(data=64, zero=3, shard=shard, batch=64) for shard in (None, 8))
    gathers = [replace(on, library=replace(on.library, data_hidden=1.0))] * 2
    assert step(hybrid, gathers[0]).data < step(whole, gathers[1]).data
    assert step(whole, on).data == step(whole, gathers[0]).data  # all is reduced beside the backward pass
    shown = step(hybrid, on).data - step(hybrid, gathers[0]).data
    across = parameters(LLAMA) / 8 * on.library.gradient_bytes
    assert shown == pytest.approx(seconds("all_reduce", across, LinkedRanks(8, 1, sharing=8), on.cluster))
    assert step(hybrid, on).optimizer == pytest.approx(8 * step(whole, on).optimizer)


def test_a_reduction_that_is_hidden_does_not_show() -> None:
    shown, half, hidden = (
        step(TrainingConfig(data=8, batch=8), machine(**CALM, data_hidden=share)).data for share in (0.0, 0.5, 1.0)
    )
    assert shown == pytest.approx(2 * half) and hidden == 0 < shown


def test_the_bubble_falls_with_microbatches_and_with_better_schedules() -> None:
    def bubble(batch: int, schedule: str = "1f1b", chunks: int = 1) -> float:
        return both(
            TrainingConfig(pipeline=4, batch=batch, schedule=schedule, stages_per_rank=chunks), machine(**CALM)
        )[1]

    shares = [bubble(batch) for batch in (4, 8, 16, 64)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 3 / 7 > bubble(4, "interleaved", 2)  # (p - 1) / (m + p - 1) of equal stages
    assert bubble(16, "zero-bubble") < bubble(16)
    assert bubble(16, "gpipe") == pytest.approx(bubble(16), rel=0.1)


def test_rounds_that_have_to_be_filled_up_are_bubbles() -> None:
    config = TrainingConfig(pipeline=4, schedule="interleaved", stages_per_rank=2)
    odd, even = (step(replace(config, batch=batch), machine(**CALM)) for batch in (11, 12))
    assert odd.step_s == pytest.approx(even.step_s)
    assert computing(odd) == pytest.approx(computing(even) * 11 / 12) and odd.bubble > even.bubble


def test_messages_of_a_pipeline_take_time_between_nodes() -> None:
    config = TrainingConfig(pipeline=4, batch=16)
    near, far = (machine(Cluster(nodes, 8 // nodes, "H100-80"), **CALM) for nodes in (1, 8))
    assert 0 < step(config, near).pipeline < step(config, far).pipeline
    parts = transformer_parts(LLAMA, Split(samples=1, sequence=2048), near.library.kernels)
    assert message_seconds(parts, replace(config, pipeline=1), near) == ()


def test_only_messages_that_leave_a_node_are_those_of_the_network() -> None:
    parts = transformer_parts(LLAMA, Split(samples=1, sequence=2048), machine().library.kernels)
    on_two = machine(Cluster(2, 4, "H100-80"), **CALM)
    one = TrainingConfig(pipeline=4, batch=16, data=2)  # stages 0 and 1 on the first node
    near, far, again = message_seconds(parts, one, on_two)
    assert near == again < far
    looped = replace(one, schedule="interleaved", stages_per_rank=2)
    assert message_seconds(parts, looped, on_two) == (near, far, near, far, near, far, near)


def test_on_a_cpu_gradients_of_microbatches_are_added_up_and_ranks_sum_a_few_numbers() -> None:
    cluster = Cluster(1, 4, "cpu", "gloo", {("all_reduce", ranks): Link(0.5, 0.0) for ranks in (2, 4)})
    library = own_library("float32", bitwise=False, on_cpu=True)
    assert (library.sum_bytes, library.step_sums) == (12, 2)  # reads a gradient and the sum, writes the sum
    config, on = TrainingConfig(data=4, batch=16), Machine(cluster, speeds_of(cluster), library)
    without = step(config, replace(on, library=replace(library, sum_bytes=0.0, step_sums=0)))
    with_sums, with_both = step(config, replace(on, library=replace(library, sum_bytes=0.0))), step(config, on)
    assert with_sums.step_s - without.step_s == pytest.approx(2 * 0.5)
    added = config.microbatches * parameters(LLAMA) * 12 / on.speeds.bandwidth
    assert with_both.step_s - with_sums.step_s == pytest.approx(added, rel=0.05)
    alone = replace(config, data=1, batch=4)
    assert step(alone, on) == step(alone, replace(on, library=replace(library, step_sums=0)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_of_16_bits_share_no_memory_on_cpus_and_take_gloo_longer(dtype: str) -> None:
    links = {("all_reduce", 2): Link(0.0, 3e-9), ("sum", 2): Link(0.0, 1e-9)}
    cluster = Cluster(1, 2, "cpu", "gloo", links=links)
    split, whole = TrainingConfig(tensor=2, batch=2), TrainingConfig(data=2, batch=2)

    def tensor_s(dtype: str) -> float:
        return step(replace(split, dtype=dtype), machine(cluster, **CALM, tensor_s=0.0)).tensor

    def data_s(dtype: str, gradient_bytes: float) -> float:
        on = machine(cluster, **CALM, data_hidden=0.0, gradient_bytes=gradient_bytes)
        return step(replace(whole, dtype=dtype), on).data

    assert not {f"torch.{narrow}" for narrow in NARROW_ON_CPUS} & {*map(str, TYPES)}
    assert tensor_s(dtype) == pytest.approx(NARROW_ON_CPUS[dtype] * 3 * tensor_s("float32") / 2, rel=1e-6)
    assert data_s(dtype, 2) == pytest.approx(NARROW_ON_CPUS[dtype] * data_s("float32", 4) / 2, rel=1e-6)
    assert data_s(dtype, 4) == pytest.approx(data_s("float32", 4), rel=1e-6)  # gradients of float32 weights


def test_a_slow_link_holds_up_the_hops_that_cross_it_alone() -> None:
    parts = transformer_parts(LLAMA, Split(samples=1, sequence=2048), machine().library.kernels)
    size = parts.after.input_bytes
    hops = {(node, (node + 1) % 4): Link(0.0, 4e-9 if 3 in (node, (node + 1) % 4) else 1e-9) for node in range(4)}
    four = machine(Cluster(4, 1, "cpu", "gloo", hops=hops), **CALM)
    library_s = four.library.message_s
    fast, slow = size * 1e-9 + library_s, size * 4e-9 + library_s
    assert message_seconds(parts, TrainingConfig(pipeline=4, batch=16), four) == pytest.approx((fast, fast, slow))
    of_two = TrainingConfig(pipeline=2, batch=16, data=2)  # from nodes 0 and 1 to nodes 2 and 3
    assert message_seconds(parts, of_two, four) == pytest.approx((slow,))


def test_gradients_of_stages_that_a_slow_link_does_not_join_are_reduced_sooner() -> None:
    hops = {(node, (node + 1) % 4): Link(0.0, 4e-9 if 3 in (node, (node + 1) % 4) else 1e-9) for node in range(4)}
    between = {("all_reduce", 2, 1): Link(0.0, 8e-9)}  # of the slowest pair of nodes
    plain = machine(Cluster(4, 1, "cpu", "gloo", between=between), **CALM, data_hidden=0.0, weights_wait=True)
    each = replace(plain, cluster=replace(plain.cluster, hops=hops))
    config = TrainingConfig(pipeline=2, data=2, batch=16)  # nodes 2 and 3 have the last stage
    bytes_each = plain.library.gradient_bytes * 8e-9
    for first, last, slowest in ((3, 1, 1.0), (8, 1, 2.0), (1, 3, 3.0)):
        stages = [StageTime(parameters=first * 1000), StageTime(parameters=last * 1000)]
        assert _reduction_tail(stages, config, plain) == pytest.approx(max(first, last) * 1000 * bytes_each)
        assert _reduction_tail(stages, config, each) == pytest.approx(slowest * 1000 * bytes_each)


def test_messages_may_be_under_way_while_another_stage_computes() -> None:
    config = TrainingConfig(pipeline=2, batch=16)
    parts = transformer_parts(LLAMA, Split(samples=1, sequence=2048), machine().library.kernels)
    plain, overlaps = machine(), machine(messages_overlap=True)
    several = replace(config, schedule="interleaved", stages_per_rank=2)
    assert message_seconds(parts, several, plain) == 3 * message_seconds(parts, config, plain)
    assert min(message_seconds(parts, config, plain)) > 0
    assert message_seconds(parts, several, overlaps) == (0, 0, 0)
    assert message_seconds(parts, config, overlaps) == message_seconds(parts, config, plain)


def test_a_host_that_is_slower_than_the_device_is_waited_for() -> None:
    slow, fast = (step(TrainingConfig(batch=1), machine(host_s=host, jitter=0.0), "gpt2") for host in (10e-3, 0.0))
    assert fast.host == 0
    layers = find_shape("gpt2").layers
    assert slow.host + computing(slow) == pytest.approx(layers * 25e-3, rel=0.1)
    assert computing(slow) == computing(fast)
    # Beside large operations the same host does not show.
    large = step(TrainingConfig(batch=64, microbatch=64), machine(host_s=1e-4, jitter=0.0))
    assert large.host < 1e-3 * large.step_s


def test_an_update_on_the_host_waits_for_copies_and_for_one_thread() -> None:
    on = machine(jitter=0.0)
    config = TrainingConfig(data=8, zero=1, batch=8)
    elements, here = parameters(find_shape("llama-3.1-8b")) / 8, step(config, on)
    there = step(replace(config, offload="optimizer"), on)
    copied = 3 * 4 * elements / (0.76 * 63e9)  # values and gradients there, values back, over the fifth PCIe
    stepped = on.library.optimizer_bytes * elements / host_bandwidth()
    assert there.optimizer == pytest.approx(copied + stepped)
    assert replace(there, optimizer=here.optimizer) == here and there.optimizer > 100 * here.optimizer
    fetched = step(replace(config, offload="parameters"), on)
    assert fetched.optimizer == pytest.approx(stepped)


def test_more_nodes_wait_for_each_other_longer() -> None:
    shares = [
        step(
            TrainingConfig(data=8 * nodes, batch=8 * nodes), machine(Cluster(nodes, 8, "H100-80"), jitter=jitter)
        ).step_s
        for nodes, jitter in ((1, 0.5), (1, 0.0), (16, 0.01), (16, 0.0))
    ]
    assert shares[0] == shares[1] and shares[2] == pytest.approx(1.04 * shares[3])


def test_two_that_run_beside_each_other_take_as_long_as_the_slower() -> None:
    assert overlapped(0.0, 0.0) == 0 and overlapped(3.0, 0.0) == overlapped(0.0, 3.0) == 3
    assert max(4.0, 3.0) <= overlapped(4.0, 3.0) <= 4.2 and overlapped(1.0, 1.0) < 1.2
    assert overlapped(1.0, 100.0) == pytest.approx(100)


@pytest.mark.parametrize(
    ("blocks", "stages", "layers"),
    [
        (24, 4, (6, 6, 6, 6)),
        (30, 4, (7, 8, 8, 7)),  # embedding and head count as one block each
        (70, 12, (5, *[6] * 10, 5)),
        (25, 4, (7, 7, 7, 4)),
        (9, 4, (3, 3, 3, 0)),
        (2, 4, (0, 1, 1, 0)),
        (5, 1, (5,)),
    ],
)
def test_blocks_are_spread_as_megatron_does(blocks: int, stages: int, layers: tuple[int, ...]) -> None:
    assert even_counts(blocks, stages) == layers and sum(layers) == blocks


def test_stages_have_the_parameters_of_their_parts() -> None:
    shape = find_shape("gpt2")
    parts = transformer_parts(shape, Split(samples=1, sequence=1024), machine().library.kernels)
    stages = stage_times(parts, [3, 3, 6], TrainingConfig(pipeline=3, sequence=1024), machine())
    block = parts.blocks[0].parameters
    ends = parts.before.parameters, parts.after.parameters + parts.tied_parameters
    assert [stage.parameters for stage in stages] == [3 * block + ends[0], 3 * block, 6 * block + ends[1]]
    assert stages[2].forward.seconds > 2 * stages[1].forward.seconds
    whole = stage_times(parts, [12], TrainingConfig(sequence=1024), machine())
    assert whole[0].parameters == 12 * block + ends[0] + parts.after.parameters


def test_uneven_stages_of_ones_own_are_slower_than_even_ones() -> None:
    even, uneven = (step(TrainingConfig(pipeline=2, batch=8, layers=layers)) for layers in ((16, 16), (8, 24)))
    assert uneven.step_s > 1.3 * even.step_s

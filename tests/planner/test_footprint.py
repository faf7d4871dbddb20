"""What ranks hold, against the formulas of ZeRO and of the schedules."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from evenly.model.parts import ModelCosts
from evenly.planner.footprint import Holdings, footprints, saved_by_stages
from evenly.planner.known import find_shape
from evenly.planner.prediction import MemoryByCause, worst
from evenly.planner.training_config import TrainingConfig
from evenly.planner.transformer import Kernels, Split, transformer_parts

ADAM = Holdings(weights=2.0, gradients=2.0, optimizer=12.0, gathered=0.0, reduced=0.0, logit=0.0)
GPT = find_shape("gpt2-medium")
PARTS = transformer_parts(GPT, Split(samples=1, sequence=1024), Kernels())
ZERO = Path(__file__).with_name("zero_table1_analytic.csv")
SIZES = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}


def of(elements: int) -> ModelCosts:
    """A model of so many parameters in one block, which keeps nothing."""
    block = replace(
        PARTS.blocks[0], parameters=elements, saved_bytes={"none": 0, "selective": 0, "full": 0}, backward_peak_bytes=0
    )
    end = replace(PARTS.after, parameters=0, saved_bytes={"none": 0, "selective": 0, "full": 0}, logits=0)
    return ModelCosts(before=replace(PARTS.before, parameters=0), blocks=[block], after=end)


def held(config: TrainingConfig, parts: ModelCosts = PARTS, holdings: Holdings = ADAM) -> list[MemoryByCause]:
    blocks, stages = len(parts.blocks), config.pipeline * config.stages_per_rank
    return footprints(parts, [blocks // stages] * stages, config, holdings)


@pytest.mark.parametrize(
    "row",
    list(csv.DictReader(ZERO.read_text().splitlines())),
    ids=lambda row: f"{row['model_params']}-{row['dp']}-{row['stage']}",
)
def test_states_are_those_of_table_1_of_zero(row: dict[str, str]) -> None:
    config = TrainingConfig(data=int(row["dp"]), zero=int(row["stage"]), batch=1024)
    (found,) = held(config, of(int(SIZES[row["model_params"]])))
    states = found.parameters + found.gradients + found.optimizer
    assert states == pytest.approx(float(row["model_state_GB_decimal"]) * 1e9, rel=1e-3, abs=6e5)
    assert found.peak == pytest.approx(states)


def test_without_zero_every_rank_holds_all_states() -> None:
    (found,) = held(TrainingConfig(data=64, batch=64), of(1000))
    assert (found.parameters, found.gradients, found.optimizer) == (2000, 2000, 12000)


def test_shards_are_cut_over_their_own_ranks_only() -> None:
    (whole,), (hybrid,) = (
        held(TrainingConfig(data=64, zero=3, shard=shard, batch=64), of(6400)) for shard in (None, 8)
    )
    assert hybrid.parameters == 8 * whole.parameters == 2 * 6400 / 8


def test_a_unit_is_gathered_under_zero_3_alone_and_the_ends_besides() -> None:
    holdings = replace(ADAM, gathered=2.0, units=2, reduced=4.0)
    block, ends = PARTS.blocks[0].parameters, PARTS.before.parameters + PARTS.after.parameters
    gathered = [held(TrainingConfig(data=8, zero=zero, batch=8), holdings=holdings)[0].gathered for zero in range(4)]
    assert gathered == [0, 0, 0, (2 * block + ends) * 2 + block * 4]
    assert held(TrainingConfig(zero=3), holdings=holdings)[0].gathered == 0


@pytest.mark.parametrize(
    ("schedule", "chunks", "flights"),
    [("gpipe", 1, [8, 8, 8, 8]), ("1f1b", 1, [4, 3, 2, 1]), ("zero-bubble", 1, [4, 3, 2, 1])],
)
def test_activations_are_those_of_the_microbatches_in_flight(schedule: str, chunks: int, flights: list[int]) -> None:
    config = TrainingConfig(pipeline=4, schedule=schedule, stages_per_rank=chunks, batch=8)
    each = saved_by_stages(PARTS, [6] * 4, config)[0]
    assert each == 6 * PARTS.blocks[0].saved_bytes["none"]
    found = [one.activations for one in held(config)]
    if schedule.startswith("zero"):  # weights' passes come later: a rank may hold more, not p + 1
        assert all(flight * each <= one <= 4 * each for flight, one in zip(flights, found, strict=True))
    else:
        assert found == [flight * each for flight in flights]


def test_interleaving_holds_more_than_1f1b_and_less_than_gpipe() -> None:
    def most(schedule: str, chunks: int) -> float:
        config = TrainingConfig(pipeline=4, schedule=schedule, stages_per_rank=chunks, batch=32)
        return max(one.activations for one in held(config))

    plain, interleaved, gpipe = most("1f1b", 1), most("interleaved", 2), most("gpipe", 1)
    # Narayanan et al. 2021, section 2.2: p (v - 1) + 2 (p - 1) + 1 chunks of half the size in the first rank.
    assert interleaved == pytest.approx(plain * (4 + 2 * 3 + 1) / (2 * 4))
    assert plain < interleaved < gpipe == 8 * plain


def test_fewer_microbatches_than_ranks_hold_fewer_activations() -> None:
    few, many = (held(TrainingConfig(pipeline=4, batch=batch))[0].activations for batch in (2, 100))
    assert many == 2 * few
    assert held(TrainingConfig(pipeline=4, batch=10**6))[0].activations == many


def test_what_a_pass_needs_is_a_block_computed_anew_or_the_loss() -> None:
    one = PARTS.blocks[0]
    full = held(TrainingConfig(recompute="full", batch=1))[0]
    anew = one.saved_bytes["none"] - one.saved_bytes["full"] + one.backward_peak_bytes
    assert full.temporaries == max(anew, PARTS.after.saved_bytes["none"])
    assert full.activations == len(PARTS.blocks) * one.saved_bytes["full"]
    loss = held(TrainingConfig(batch=1), holdings=replace(ADAM, logit=100.0))[0]
    assert loss.temporaries == PARTS.after.logits * 100 + PARTS.after.saved_bytes["none"]


def test_the_last_rank_alone_needs_logits_and_a_tied_head_once_more() -> None:
    found = held(TrainingConfig(pipeline=4, batch=8), holdings=replace(ADAM, logit=16.0))
    assert [one.temporaries > PARTS.after.logits * 16 for one in found] == [False, False, False, True]
    tied = PARTS.after.parameters + PARTS.tied_parameters
    assert found[3].parameters - found[2].parameters == 2 * tied
    assert found[0].parameters - found[1].parameters == 2 * PARTS.before.parameters
    assert found[1].parameters == found[2].parameters


def test_the_worst_rank_is_named() -> None:
    found = held(TrainingConfig(pipeline=4, batch=8, microbatch=1))
    assert worst(found) == 0
    logits = held(TrainingConfig(pipeline=4, batch=8), holdings=replace(ADAM, logit=200.0))
    assert worst(logits) == 3 and max(one.peak for one in logits) == logits[3].peak
    assert worst([MemoryByCause(context=1.0), MemoryByCause(activations=2.0), MemoryByCause(buffers=1.5)]) == 1


def test_the_first_and_the_last_stage_of_a_v_are_one_ranks() -> None:
    found = held(
        TrainingConfig(pipeline=4, schedule="zbv", stages_per_rank=2, batch=8), holdings=replace(ADAM, logit=16.0)
    )
    assert [one.temporaries > PARTS.after.logits * 16 for one in found] == [True, False, False, False]
    # It holds the embedding already, so a tied head takes no second copy.
    assert found[0].parameters - found[1].parameters == 2 * (PARTS.before.parameters + PARTS.after.parameters)


def test_some_ranks_may_be_asked_for() -> None:
    config = TrainingConfig(pipeline=4, batch=8)
    assert footprints(PARTS, [6] * 4, config, ADAM, ranks=[1, 3]) == [held(config)[rank] for rank in (1, 3)]


def test_causes_add_up_to_the_peak() -> None:
    (found,) = held(
        TrainingConfig(data=4, zero=3, recompute="full", batch=4), holdings=replace(ADAM, gathered=2.0, rest=1e9)
    )
    causes = (found.parameters, found.gradients, found.optimizer, found.activations)
    assert found.peak == pytest.approx(sum(causes) + found.gathered + found.buffers + found.temporaries + 1e9)


def test_the_update_takes_memory_when_activations_are_gone() -> None:
    config = TrainingConfig(data=4, zero=1, microbatch=1, batch=4, sequence=1024)
    (plain,) = held(config)
    elements, passing = plain.parameters / ADAM.weights, plain.activations + plain.temporaries
    for update, more in ((4.0, 0.0), (1000.0, elements * 250 - passing)):
        (found,) = held(config, holdings=replace(ADAM, update=update))
        assert found.peak - plain.peak == pytest.approx(more, abs=8)
    (found,) = held(config, holdings=replace(ADAM, update=4.0, cached=True))
    assert found.peak - plain.peak == pytest.approx(elements)  # 4 bytes over 4 shards, on top of what passes took


def test_no_more_is_gathered_than_may_live() -> None:
    config = TrainingConfig(data=4, zero=3, batch=4)
    holdings = replace(ADAM, gathered=2.0, reduced=2.0)
    (whole,) = held(config, of(10**9), holdings)
    (less,) = held(config, of(10**9), replace(holdings, live=1e8))
    assert (whole.gathered, less.gathered) == (4e9, 4e8)


def test_logits_that_the_tensor_axis_splits_may_take_more_each() -> None:
    holdings = replace(ADAM, logit=100.0, logit_split=300.0)
    (alone,) = held(TrainingConfig(microbatch=1), holdings=holdings)
    (split,) = held(TrainingConfig(tensor=2, microbatch=1), holdings=holdings)
    assert split.temporaries - alone.temporaries == 200 * PARTS.after.logits


def test_buffers_of_a_pipeline_are_of_every_microbatch_in_flight() -> None:
    config = TrainingConfig(pipeline=4, batch=16, recompute="full")
    plain, more = (held(config, holdings=replace(ADAM, buffers=buffers)) for buffers in (0.0, 2.0))
    grown = [b.activations - a.activations for a, b in zip(plain, more, strict=True)]
    assert grown == [2 * flying * PARTS.after.input_bytes for flying in (4, 3, 2, 1)]
    assert held(TrainingConfig(batch=4), holdings=replace(ADAM, buffers=2.0)) == held(TrainingConfig(batch=4))

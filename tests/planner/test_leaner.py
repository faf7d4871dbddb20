"""The plan that follows those that had no room: which there are, which is taken, what is said where none is left."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from jobs import classifier_job

import evenly
from evenly.errors import PlanError
from evenly.hardware.cluster import Cluster
from evenly.plan import PlanSpec, parse_plan
from evenly.planner.leaner import fastest_leaner, leaner_plan, leaner_specs, saves_more, text_of
from evenly.planner.prediction import MemoryByCause, Prediction, TimeByCause

CPUS = Cluster(1, 2, "cpu", own={"memory_gib": 1.0})


def texts(base: str, *, on_gpu: bool = False) -> list[str]:
    return [text_of(spec) for spec in leaner_specs(parse_plan(base), on_gpu=on_gpu)]


def test_what_changes_least_comes_first() -> None:
    rest = "precision=float32 exact=rounding"
    assert texts("data=1 pipeline=2 recompute=selective") == [f"data=1 pipeline=2 recompute=full {rest}"]
    found = texts("data=2")
    assert found[:4] == [
        f"data=2 recompute=selective {rest}",
        f"data=2 recompute=full {rest}",
        f"data=2 zero=1 {rest}",
        f"data=2 zero=1 recompute=selective {rest}",
    ]
    assert len(found) == 11 + 3 and found[-1] == f"data=1 pipeline=2 recompute=full {rest}"


def test_devices_microbatch_and_bits_stay() -> None:
    for base in ("data=4 tensor=2 microbatch=3", "data=4 exact=bitwise", "data=2 replicas=2 output_device=0"):
        asked = parse_plan(base if "replicas" not in base else "replicas=2 output_device=0").fit(
            8 if "tensor" in base else 4 if "bitwise" in base else 2
        )
        specs = leaner_specs(asked, on_gpu=True)
        assert specs
        for spec in specs:
            plan = spec.complete("float32")
            assert plan.devices == asked.devices and spec.microbatch == asked.microbatch
            assert plan.exact == (asked.exact or "rounding") and plan.tensor.size == (asked.tensor or 1)


def test_what_a_plan_states_and_others_cannot_keep_is_left_out() -> None:
    assert {spec.speeds for spec in leaner_specs(parse_plan("data=2 speeds=1|2"), on_gpu=False) if spec.zero == 3} == {
        None
    }
    assert {spec.compile for spec in leaner_specs(parse_plan("data=2 compile=blocks"), on_gpu=False)} == {"blocks"}
    grouped = leaner_specs(parse_plan("data=4 zero=3 shard=2"), on_gpu=False)
    assert {spec.shard for spec in grouped if spec.data == 4} == {2, None}


def test_a_gpu_may_offload_and_a_schedule_give_way() -> None:
    offloads = {spec.offload for spec in leaner_specs(parse_plan("data=1"), on_gpu=True)}
    assert offloads == {"none", "optimizer", "parameters"}
    assert {spec.offload for spec in leaner_specs(parse_plan("data=1"), on_gpu=False)} == {"none"}
    schedules = {spec.schedule for spec in leaner_specs(parse_plan("data=1 pipeline=2 schedule=gpipe"), on_gpu=False)}
    assert schedules == {"gpipe", "1f1b"}


def test_ranks_of_the_tensor_axis_may_share_the_sequence() -> None:
    specs = leaner_specs(parse_plan("data=2 tensor=2"), on_gpu=False)
    assert {spec.sequence_parallel for spec in specs if spec.pipeline is None} == {None, True}
    assert {spec.sequence_parallel for spec in specs if spec.pipeline} == {None}
    stated = leaner_specs(parse_plan("data=2 tensor=2 sequence_parallel=on"), on_gpu=False)
    assert {spec.sequence_parallel for spec in stated if spec.pipeline is None} == {True}


def test_without_predictions_a_plan_has_to_save_in_every_way() -> None:
    full, zero, both = (
        parse_plan(text) for text in ("data=2 recompute=full", "data=2 zero=1", "data=2 zero=1 recompute=full")
    )
    assert saves_more(both, full) and saves_more(both, zero)
    assert not saves_more(zero, full) and not saves_more(full, zero) and not saves_more(full, full)


def predicted(text: str, peak: float, step_s: float) -> Prediction:
    return Prediction(
        plan=parse_plan(text).complete("float32"),
        memory=[MemoryByCause(activations=peak)],
        limit_bytes=1e9,
        time=TimeByCause(matmul=step_s),
        samples=8,
        tokens=None,
        flops=1.0,
        peak_flops=1.0,
        comm_bytes=0.0,
        bubble=0.0,
    )


def test_the_fastest_of_those_that_need_less_than_all_that_failed() -> None:
    ddp, selective = predicted("data=2", 100, 1.0), predicted("data=2 recompute=selective", 80, 1.1)
    zero, full = predicted("data=2 zero=3", 90, 1.05), predicted("data=2 recompute=full", 40, 1.5)
    assert fastest_leaner([selective, zero, full], [ddp]) is zero
    assert fastest_leaner([selective, full], [ddp, zero]) is selective
    assert fastest_leaner([zero, full], [ddp, selective]) is full
    assert fastest_leaner([zero], [ddp, full]) is None


def test_little_less_memory_and_offloading_come_last() -> None:
    ddp, hardly = predicted("data=2", 100, 1.0), predicted("data=2 zero=1", 99, 1.0)
    full, offloaded = predicted("data=2 recompute=full", 40, 1.5), predicted("data=2 offload=optimizer", 40, 1.0)
    assert fastest_leaner([hardly, offloaded, full], [ddp]) is full
    assert fastest_leaner([hardly, offloaded], [ddp]) is offloaded
    assert fastest_leaner([hardly], [ddp]) is hardly


class Lengths(torch.utils.data.Dataset[torch.Tensor]):
    """Of eight samples, all short in the first step and long in the second."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(4 if index < 4 else 400, 16)


def layers_job() -> evenly.Job:
    layers = [torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)) for _ in range(4)]
    return evenly.Job(
        model=lambda: torch.nn.Sequential(*layers),
        loss=lambda model, x: evenly.Loss(model(x).square().sum(), len(x)),
        data=Lengths(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
        global_batch=4,
        microbatch=2,
        steps=2,
        shuffle=False,
    )


def test_a_job_is_led_to_its_leanest_plan_and_to_a_microbatch_that_would_fit() -> None:
    failed, peaks, said = [parse_plan("data=2")], [float("inf")], None
    while said is None:
        try:
            spec, found = leaner_plan(layers_job(), failed, [], CPUS, step=1)
        except PlanError as problem:
            said = problem
        else:
            assert found is not None and found.peak_bytes < peaks[-1]
            peaks.append(found.peak_bytes)
            failed.append(spec)
    assert len(failed) > 2 and failed[-1].recompute == "full"
    assert all(f"{text_of(spec)} had no room" in said.found for spec in failed)
    assert f"microbatch=1 is the largest that is predicted to fit under {text_of(failed[-1])}" in said.do


def test_what_saves_elsewhere_than_at_the_predicted_peak_is_taken_where_nothing_else_is_left() -> None:
    """A lack of memory may come in the forward, though the update is predicted to need most."""
    job, failed = replace(layers_job(), microbatch=1), [parse_plan("data=1 tensor=2")]
    spec, found = leaner_plan(job, failed, [], CPUS, step=0)
    assert found is not None and spec.recompute != "none"
    before = found.peak_bytes
    spec, found = leaner_plan(job, [*failed, spec], [], CPUS, step=0)
    assert found is not None and found.peak_bytes == before and spec.recompute == "full"
    with pytest.raises(PlanError, match="has room"):
        leaner_plan(job, [*failed, replace(failed[0], recompute="selective"), spec], [], CPUS, step=0)


def test_what_was_refused_is_not_taken_again() -> None:
    spec, _ = leaner_plan(layers_job(), [parse_plan("data=2")], [], CPUS, step=1)
    other, _ = leaner_plan(layers_job(), [parse_plan("data=2")], [spec], CPUS, step=1)
    assert text_of(other) != text_of(spec)


def test_a_model_that_needs_numbers_goes_by_the_order_of_plans() -> None:
    base = parse_plan("data=2")
    spec, found = leaner_plan(classifier_job(), [base], [], CPUS, step=0)
    assert found is None and text_of(spec) == text_of(replace(base, recompute="selective"))
    last = parse_plan("data=2 zero=3 recompute=full")
    pipeline, _ = leaner_plan(classifier_job(), [base, replace(base, recompute="full", zero=None)], [], CPUS, step=0)
    assert text_of(pipeline).startswith("data=2 zero=1 recompute=full")
    with pytest.raises(PlanError, match="had no room"):
        leaner_plan(classifier_job(), [base, last, parse_plan("data=1 pipeline=2 recompute=full")], [], CPUS, step=0)


def test_the_step_counts_that_had_no_room() -> None:
    short, long = (leaner_plan(layers_job(), [PlanSpec(data=2)], [], CPUS, step=step)[1] for step in (0, 1))
    assert short is not None and long is not None
    assert long.peak_bytes > 5 * short.peak_bytes and long.plan.recompute != "none"

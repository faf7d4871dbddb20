"""Records of a run: events and metrics go to sinks, decisions to plan.json."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenly.checkpoint.adapter import write_adapter
from evenly.checkpoint.config import write_model_config
from evenly.checkpoint.plain import encode
from evenly.comm.world import World
from evenly.data.loader import idle_ranks
from evenly.errors import RunError, UserError
from evenly.observe.run_folder import RunFolder
from evenly.observe.sinks import FolderSink, Sink, finite, writing
from evenly.observe.slow import SlowRank
from evenly.train.device_memory import memory_limit_bytes
from evenly.train.reports import Evaluation, StepReport

if TYPE_CHECKING:
    from evenly.train.run import Run

PLAIN = (bool, int, float, str, type(None))
STEPS_WITH_SPANS = 5  # in which passes, and operations between ranks, are recorded


class RunRecorder:
    """Passes records of this rank to the sinks.

    counted: the step in which the memory of tensors is counted, once the optimizer has state; None without a folder.
    spanned: the steps in which passes are recorded; after `counted`, since counting makes a step slower.
    """

    def __init__(
        self, folder: RunFolder | None, world: World, sinks: Sequence[Sink], *, steps_done: int, steps: int
    ) -> None:
        self._rank, self._is_main = world.rank, world.is_main
        own = [FolderSink(folder, world.rank)] if folder is not None else []
        self._sinks: list[Sink] = [*own, *sinks]
        self._given = sinks
        self.counted = min(steps_done + 1, steps - 1) if folder is not None else None
        self.spanned = range(min(steps_done + 2, steps - 1), steps_done + 2 + STEPS_WITH_SPANS) if folder else range(0)
        self._event("started", rank=world.rank, size=world.size, step=steps_done, pid=os.getpid())

    def begin(self, config: Mapping[str, Any], *, step: int, out: Path | None) -> None:
        """Says to the sinks that were given what is trained; step: after which the run goes on."""
        for sink in self._given:
            sink.write("config", {"rank": self._rank, "step": step, "out": out and str(out), "config": config})

    def step(self, report: StepReport) -> None:
        if self._is_main and self._sinks:
            record = {**vars(report), "samples_per_s": report.samples_per_s, "tokens_per_s": report.tokens_per_s}
            record |= {"metrics": report.metrics or None, "busy_s": report.busy_s or None}
            record |= {"communication": report.communication or None}
            self._metrics({name: value for name, value in record.items() if value is not None})

    def evaluated(self, step: int, found: Evaluation) -> None:
        """Records an evaluation after `step`, each of its sets."""
        for name, one in found.by_name.items():
            of_set: dict[str, Any] = {"step": step, "eval_set": name} if name else {"step": step}
            values = {"loss": one.loss, "weight": one.weight, "samples": one.samples}
            further: dict[str, Any] = {"eval_metrics": one.metrics} if one.metrics else {}
            if found.averaged:
                further["eval_averaged"] = True
            self._event("evaluated", **of_set, **values, **further)
            self._metrics({**of_set, "eval_loss": one.loss, "eval_weight": one.weight, **further})

    def logged(self, step: int, values: Mapping[str, Any]) -> None:
        """Records what the job logs after `step`. Raises `UserError` for what is no number, text or list of them."""
        own = ({"step", "eval_loss", "eval_weight", "slow_rank"} | {one.name for one in fields(StepReport)}) & {*values}
        if own:
            asked, found = f"logging {', '.join(sorted(own))}", "the run records values of its own by these names"
            raise UserError(asked, found, "give them other names")
        found = {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}
        for name, value in found.items():
            encode(value, f"{name!r}, which is logged,")
        self._metrics({"step": step, **found})

    def slow(self, step: int, found: SlowRank, processor: str) -> None:
        """Records that a rank is slow, as of `step`."""
        self._metrics({"step": step, "slow_rank": found.rank, "ratio": found.ratio, "processor": processor})

    def saved(self, step: int) -> None:
        """Records that a checkpoint of `step` was begun."""
        self._event("saved", step=step)

    def spans(self, step: int, position: int, spans: Sequence[Any]) -> None:
        """Records what this rank, at `position` of its pipeline, did in `step`: named tuples with a kind and times."""
        for span in spans:
            values = {name: value for name, value in span._asdict().items() if value is not None}
            record = {"step": step, "rank": self._rank, "position": position, **values}
            for sink in self._sinks:
                sink.write("timeline", record)

    def close(self, step: int, *, failed: bool) -> None:
        """Records the end of the run after `step`, and closes the sinks; safe to call twice."""
        if self._sinks:
            # The error that a run has failed with may be that nothing can be written.
            with suppress(RunError) if failed else nullcontext():
                self._event("failed" if failed else "ended", step=step)
        for sink in self._sinks:
            sink.close()
        self._sinks = []

    def _metrics(self, record: Mapping[str, Any]) -> None:
        for sink in self._sinks if self._is_main else ():
            sink.write("metrics", record)

    def _event(self, name: str, **details: Any) -> None:
        for sink in self._sinks:
            sink.write("events", {"time": time.time(), "event": name, **details})


def record_decisions(run: Run, predicted: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> None:
    """Writes plan.json and the model's config on the main rank; passes what is trained to the sinks, on all.

    settings: of the job. Raises `UserError` where a sink cannot take the records of this run.
    """
    if run.out is not None and run.world.is_main:
        folder = RunFolder(run.out)
        with writing(folder.plan):
            _write_decisions(run, folder, predicted, settings)
    run.recorder.begin(_config(run, settings), step=run.steps_done, out=run.out)


def _config(run: Run, settings: Mapping[str, Any]) -> dict[str, Any]:
    plain = {field.name: getattr(run.job, field.name) for field in fields(run.job)}
    plain = {name: str(value) if is_dataclass(value) else value for name, value in plain.items()}  # as EMA(decay=0.9)
    plain = {name: value for name, value in plain.items() if isinstance(value, int | float | str)}
    sizes = {"world": run.world.size, "parameters": run.composed.elements}
    return {"settings": {**settings}, "job": {**plain, "steps": run.steps}, "plan": str(run.plan), **sizes}


def _write_decisions(
    run: Run, folder: RunFolder, predicted: Mapping[str, Any] | None, settings: Mapping[str, Any]
) -> None:
    folder.root.mkdir(parents=True, exist_ok=True)
    if run.steps_done < run.steps or not folder.plan.exists():  # else keep those of the finished run
        job = run.job
        decisions: dict[str, Any] = {
            "job": job.name,
            "plan": str(run.plan),
            "world": run.world.size,
            "steps": run.steps,
            "global_batch": job.global_batch,
            "microbatch": None if job.microbatch_cost is not None else job.samples_per_microbatch,
            "microbatch_cost": job.microbatch_cost,
            "seed": job.seed,
            "idle_ranks": idle_ranks(job, run.plan.data.size),
            "parameters": run.composed.elements,
            "memory_limit_bytes": memory_limit_bytes(run.world),
            "settings": finite({key: one if isinstance(one, PLAIN) else str(one) for key, one in settings.items()}),
        }
        if predicted is not None:
            decisions["predicted"] = predicted
        folder.plan.write_text(json.dumps(decisions, indent=1) + "\n")
    pipeline = run.composed.pipeline
    write_model_config(run.model, folder.model_config, pipeline.tensors if pipeline is not None else ())
    write_adapter(run.model_start.adapter, folder.adapter)

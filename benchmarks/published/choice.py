"""The planner's choice beside the published one: `python -m benchmarks.published.choice [SOURCE ...]`.

For every model and cluster of the sources the published plan is predicted, and so is the one that the search puts
first for the same model, devices, batch, numbers and library. Published plans were found by people and sweeps; one
that the search misses by more than 5 % shows a hole in the space that it searches.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from benchmarks.published import cases
from benchmarks.published.libraries import PublishedLibrary, PublishedSource, library_named
from benchmarks.published.rows import TRAINING, Incomplete, Row, measured, read
from evenly.errors import UserError
from evenly.plan import Plan, PlanSpec
from evenly.planner.prediction import Prediction
from evenly.planner.request import PlanRequest
from evenly.planner.search import search
from evenly.planner.training_config import TrainingConfig

SOURCES = ("nanotron-ultrascale", "nvidia-dgxc")
NEAR = 1.05


@dataclass(frozen=True, kw_only=True)
class LibraryRequest(PlanRequest):
    """run_by: the library that would run the plans. dtype: what it multiplies."""

    run_by: PublishedLibrary
    dtype: str

    def config(self, plan: Plan) -> TrainingConfig:
        found = super().config(plan)
        split = found.split_sequence or (found.tensor > 1 and self.run_by.splits_sequence)
        return replace(found, dtype=self.dtype, split_sequence=split)

    def library(self, plan: Plan) -> PublishedLibrary:
        return self.run_by


def compared(row: Row) -> tuple[cases.Case, float, Prediction | None] | None:
    """The case of a row, what is predicted of its plan, and the search's own; None where the row has no time."""
    try:
        case = cases.case_of(row.cells)
        published = cases.predict_row(row.cells).step_s
    except Incomplete:
        return None
    if published is None or measured(row).step_s is None:
        return None
    library = cases.gathering(case, library_named(case.library))
    request = LibraryRequest(
        source=PublishedSource(case.shape, library.kernels),
        cluster=case.cluster,
        batch=case.config.batch,
        only=PlanSpec(exact="rounding", precision="bfloat16"),
        run_by=library,
        dtype=case.config.dtype,
        top=1,
        reserve=0.0,  # as people chose theirs
    )
    try:
        result = search(request)
    except UserError:
        return case, published, None
    return case, published, next(iter(result.plans), None)


def main() -> None:
    sources = sys.argv[1:] or SOURCES
    seen: set[tuple[object, ...]] = set()
    near = total = 0
    for row in read(TRAINING):
        if row.source not in sources or (found := compared(row)) is None:
            continue
        case, published, best = found
        key = (case.shape, case.cluster.size, replace(case.config, layers=None), case.library)
        if key in seen:
            continue
        seen.add(key)
        ratio = best.step_s / published if best else float("inf")
        total, near = total + 1, near + (ratio <= NEAR)
        config = case.config
        text = (
            f"data={config.data} tensor={config.tensor} context={config.context} pipeline={config.pipeline} "
            f"{config.schedule} x{config.stages_per_rank} zero={config.zero} microbatch={config.microbatch}"
        )
        print(f"{ratio:5.2f}  {row.id}  {case.shape.name} on {case.cluster} {config.dtype}: {published:.3g} s {text}")
        print(f"       {best.step_s:.3g} s {best.plan}" if best else "       nothing fits")
    print(f"{near} of {total} within 5 % of the published plan, or faster")


if __name__ == "__main__":
    main()

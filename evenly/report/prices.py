"""Clusters held against each other for one model: the time and the cost of a run, as a table, a page and JSON. Pure.

Prices are of one device for one hour, in whatever money; paid are the devices that a plan uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evenly.observe.progress import duration
from evenly.planner.around import GridCell, frontier
from evenly.planner.prediction import Prediction
from evenly.report.comm import size_in_words, time_in_words
from evenly.report.draw import ChartAxis, Point, StackedBar, axis, points, stacked
from evenly.report.page import Figure, Section, SortedCell, as_table, document, folded, head, sortable, text
from evenly.report.plans import common, prediction_as_json, rate_per_device, short
from evenly.report.plantable import answer, number_in_words

HOUR_S = 3600.0
TOKENS, SAMPLES = 1e9, 1e6  # of which the cost is given where the length of the run is not known
FASTEST, CHEAPEST = "fastest", "cheapest"
ON_THE_FRONTIER, BEHIND = "neither slower nor dearer than another", "slower and dearer than another"
COLOURS = {FASTEST: "c2", CHEAPEST: "c1", f"{FASTEST} and {CHEAPEST}": "c3", ON_THE_FRONTIER: "c0", BEHIND: "c7"}


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A cluster with the plans that were found for it, fastest first; `refused` says why there is none.

    price: of a device for an hour; None where it was not stated. steps: of the run; None where they are not known.
    """

    cluster: str
    devices: int
    price: float | None
    plans: Sequence[Prediction] = ()
    refused: str = ""
    steps: float | None = None

    @property
    def best(self) -> Prediction:
        return self.plans[0]

    @property
    def cost_of_step(self) -> float | None:
        return None if self.price is None else self.price * self.best.plan.devices * self.best.step_s / HOUR_S

    @property
    def cost_of_unit(self) -> float | None:
        if self.cost_of_step is None:
            return None
        return self.cost_of_step * (TOKENS / self.best.tokens if self.best.tokens else SAMPLES / self.best.samples)

    @property
    def run_s(self) -> float | None:
        return None if self.steps is None else self.steps * self.best.step_s

    @property
    def cost_of_run(self) -> float | None:
        return None if self.steps is None or self.cost_of_step is None else self.steps * self.cost_of_step


def marks(offers: Sequence[Offer]) -> list[str]:
    able = [at for at, one in enumerate(offers) if one.plans]
    fastest = min(able, key=lambda at: offers[at].best.step_s, default=None)
    priced = [at for at in able if offers[at].cost_of_step is not None]
    cheapest = min(priced, key=lambda at: offers[at].cost_of_step or 0.0, default=None)
    which = ((fastest, FASTEST), (cheapest, CHEAPEST))
    return [" and ".join(word for number, word in which if number == at) for at in range(len(offers))]


# --- the table -----------------------------------------------------------------------------------------


def unit(offers: Sequence[Offer]) -> str:
    return "1e9 tokens" if any(one.plans and one.best.tokens for one in offers) else "1e6 samples"


def heads(offers: Sequence[Offer]) -> tuple[str, ...]:
    rate = "tokens" if any(one.plans and one.best.tokens for one in offers) else "samples"
    priced = any(one.price is not None for one in offers)
    whole = any(one.steps is not None for one in offers)
    return (
        *("cluster", "plan", "step", f"{rate}/s", "full"),
        *(("per hour", f"per {unit(offers)}") if priced else ()),
        *(("run",) if whole else ()),
        *(("run costs",) if whole and priced else ()),
        "",
    )


def rows(offers: Sequence[Offer]) -> list[tuple[str, ...]]:
    return [tuple(cell.words for cell in row) for row in _cells(offers)]


def _cells(offers: Sequence[Offer]) -> list[list[SortedCell]]:
    names = heads(offers)
    return [[_cell(name, one, mark) for name in names] for one, mark in zip(offers, marks(offers), strict=True)]


def _cell(name: str, one: Offer, mark: str) -> SortedCell:
    if name == "cluster":
        return SortedCell(one.cluster)
    if not one.plans:
        return SortedCell(one.refused if name == "plan" else "")
    best = one.best
    rate = rate_per_device(best) * best.plan.devices
    hour = None if one.price is None else one.price * best.plan.devices
    found: Mapping[str, SortedCell] = {
        "plan": SortedCell(short(best.plan, common([best]))),
        "step": SortedCell(time_in_words(best.step_s), best.step_s),
        "full": SortedCell(f"{best.peak_bytes / best.limit_bytes:.0%}", best.peak_bytes / best.limit_bytes),
        "per hour": _money(hour),
        "run": SortedCell("" if one.run_s is None else duration(one.run_s), one.run_s),
        "run costs": _money(one.cost_of_run),
        "": SortedCell(mark),
    }
    if name in found:
        return found[name]
    return _money(one.cost_of_unit) if name.startswith("per ") else SortedCell(number_in_words(rate), rate)


def _money(amount: float | None) -> SortedCell:
    return SortedCell("" if amount is None else money(amount), amount)


def money(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 1000 else f"{amount:,.2f}" if amount >= 1 else f"{amount:.3g}"


def title(model: str, offers: Sequence[Offer], batch: int, *, assumed: bool) -> str:
    tokens = next((one.best.tokens for one in offers if one.plans), None)
    of = f"{model} on {len(offers)} cluster{'s' * (len(offers) != 1)}, a step of {batch:,} samples"
    of += f" ({tokens:,} tokens)" if tokens else ""
    return of + (", assumed: --global-batch sets it" if assumed else "")


# --- JSON ----------------------------------------------------------------------------------------------


def offers_as_json(model: str, offers: Sequence[Offer], batch: int, *, assumed: bool) -> dict[str, Any]:
    """The answer as `evenly plan --json` prints it: seconds, and money in that of the prices."""
    return {
        "model": model,
        "global_batch": batch,
        "assumed": ["global_batch"] if assumed else [],
        "clusters": [_as_json(one) | {"is": mark} for one, mark in zip(offers, marks(offers), strict=True)],
    }


def _as_json(one: Offer) -> dict[str, Any]:
    stated = {"cluster": one.cluster, "devices": one.devices, "price_per_device_hour": one.price}
    if not one.plans:
        return {**stated, "plan": None, "refused": one.refused}
    per = "cost_per_1e9_tokens" if one.best.tokens else "cost_per_1e6_samples"
    costs = {"cost_per_step": one.cost_of_step, per: one.cost_of_unit, "run_steps": one.steps}
    return {**stated, "plan": prediction_as_json(one.best), **costs, "run_s": one.run_s, "run_cost": one.cost_of_run}


# --- the page ------------------------------------------------------------------------------------------


def page(model: str, offers: Sequence[Offer], batch: int, *, assumed: bool) -> str:
    able = [one for one in offers if one.plans]
    lost = [text(f"{one.cluster}: {one.refused}", kind="warn") for one in offers if not one.plans]
    label = "clusters"
    parts = [
        head(_figures(offers)),
        *lost,
        *([_picture(offers)] if len(able) > 1 and all(one.price is not None for one in able) else []),
        sortable(heads(offers), _cells(offers), label=label, keys=[one.cluster for one in offers]),
    ]
    return document(
        f"{model}: clusters and costs",
        Section("Clusters", parts),
        Section("A step's time, cluster by cluster", [_times(able)]),
        Section("Plans of each cluster", [_plans(one) for one in able]),
        lead=title(model, offers, batch, assumed=assumed),
    )


def _figures(offers: Sequence[Offer]) -> list[Figure]:
    found = list[Figure]()
    for one, mark in zip(offers, marks(offers), strict=True):
        if mark:
            time = time_in_words(one.best.step_s) + " a step"
            time += f", {duration(one.run_s)} the run" if one.run_s is not None else ""
            found.append(Figure(mark, one.cluster, f"{time}{_costs(one)}"))
    return found


def _costs(one: Offer) -> str:
    if one.cost_of_run is not None:
        return f", which costs {money(one.cost_of_run)}"
    return "" if one.cost_of_unit is None else f"; {unit([one])} cost {money(one.cost_of_unit)}"


def _picture(offers: Sequence[Offer]) -> str:
    able = [(one, mark) for one, mark in zip(offers, marks(offers), strict=True) if one.plans]
    whole = able[0][0].steps is not None
    places = [
        (one.run_s or 0.0, one.cost_of_run or 0.0) if whole else (one.best.step_s, one.cost_of_unit or 0.0)
        for one, _ in able
    ]
    best = frontier(places)
    kinds = [mark or (ON_THE_FRONTIER if at in best else BEHIND) for at, (_, mark) in enumerate(able)]
    found = [
        Point(x, y, kind, f"{one.cluster}\n{_said(one, whole=whole)}", one.cluster)
        for (one, _), (x, y), kind in zip(able, places, kinds, strict=True)
    ]
    return points(
        found,
        COLOURS,
        title=f"cost of {'the run' if whole else unit(offers)} against time",
        across=_time_axis([x for x, _ in places], whole=whole),
        up=axis([1.05 * max(y for _, y in places)], "cost", zero=True),
        frontier=[places[at] for at in best],
    )


def _said(one: Offer, *, whole: bool) -> str:
    if whole:
        return f"{duration(one.run_s or 0.0)}, costs {money(one.cost_of_run or 0.0)}"
    return f"{time_in_words(one.best.step_s)} a step, {unit([one])} cost {money(one.cost_of_unit or 0.0)}"


def _time_axis(times: Sequence[float], *, whole: bool) -> ChartAxis:
    units = ((1.0, "s"), (60.0, "min"), (HOUR_S, "h"), (24 * HOUR_S, "d"))
    ends = [0.9 * min(times), 1.05 * max(times)]
    return axis(ends, "time of the run" if whole else "time of a step", units=units)


def _times(able: Sequence[Offer]) -> str:
    bars = [StackedBar(one.cluster, asdict(one.best.time)) for one in able]
    causes = [*dict.fromkeys(cause for bar in bars for cause, amount in bar.parts.items() if amount)]
    numbers = [(bar.label, *(time_in_words(bar.parts[cause]) for cause in causes)) for bar in bars]
    return stacked(bars, time_in_words, title="time by cause") + as_table(("", *causes), numbers)


def _plans(one: Offer) -> str:
    cell = GridCell(devices=one.best.plan.devices, batch=one.best.samples, cluster=one.cluster, plans=one.plans)
    return folded(f"{one.cluster}, {size_in_words(one.best.limit_bytes)} per device", answer(cell))

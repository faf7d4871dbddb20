"""Which of the groups of a model are split over a number of ranks, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import inf

from evenly.errors import PlanError
from evenly.parallel.tensor.splits import Derivation, ParameterSplit, SplitGroup

# Units that do not divide are dealt all the same where no rank gets more than this times the mean: a vocabulary of
# 50,257 entries over 2 ranks, but not 3 heads.
LARGEST_SHARE = 1.1
# A lookup computes nothing that splitting would shorten: it must save as many bytes as it moves. Saved are, for an
# element, a parameter, its gradient and two numbers of the optimizer's.
SAVED_BYTES = 16


@dataclass(frozen=True)
class Selection:
    """What is split over `ranks` ranks.

    splits: first name of each split parameter -> how.
    chosen: the groups that are split, in the derivation's order.
    left:   the groups that are not, each with the reason.
    share:  of all elements of the model's parameters, those that are split.
    """

    ranks: int
    splits: dict[str, ParameterSplit]
    chosen: tuple[SplitGroup, ...]
    unsplit: tuple[tuple[SplitGroup, str], ...]
    share: float


def select(derivation: Derivation, ranks: int, whole: Sequence[str] = ()) -> Selection:
    """The groups to split over `ranks` ranks: of those that want the same parameter, the one that splits most per byte.

    whole: patterns (`fnmatch`) of the names of parameters that stay whole; a tied parameter goes by each of its names.

    Raises `PlanError` for a pattern that no parameter has.
    """
    kept = _excluded(derivation, whole)
    splits: dict[str, ParameterSplit] = {}
    reasons: dict[int, str] = {}
    order = sorted(range(len(derivation.groups)), key=lambda at: -_worth(derivation.groups[at]))  # of equals the first
    for at in order:
        group = derivation.groups[at]
        reason = _reason(group, ranks, kept, splits)
        if reason:
            reasons[at] = reason
        else:
            splits.update({one.name: one for one in group.parameters})
    split = sum(derivation.elements[name] for name in splits)
    return Selection(
        ranks=ranks,
        splits={name: splits[name] for name in derivation.elements if name in splits},
        chosen=tuple(group for at, group in enumerate(derivation.groups) if at not in reasons),
        unsplit=tuple((derivation.groups[at], reasons[at]) for at in sorted(reasons)),
        share=split / max(sum(derivation.elements.values()), 1),
    )


def _worth(group: SplitGroup) -> float:
    """The elements that are split per byte moved."""
    moved = group.forward_bytes + group.backward_bytes
    return group.elements / moved if moved else inf


def _reason(group: SplitGroup, ranks: int, kept: dict[str, str], splits: dict[str, ParameterSplit]) -> str:
    """Why the group is not split, given what is split already; empty where it is."""
    for one in group.parameters:
        if one.name in kept:
            return f"{one.name} is kept whole by {kept[one.name]!r}"
    if not _even(group.units, ranks):
        return f"{group.units} units do not divide by {ranks} ranks"
    for one in group.parameters:
        if one.name in splits:
            return (
                f"{one.name} is split along dim {splits[one.name].dim} as {_shown(splits[one.name])}, for fewer bytes"
            )
    moved = group.forward_bytes + group.backward_bytes
    if not group.products and moved > SAVED_BYTES * group.elements:
        return f"its {group.elements} elements are too few for the {moved} bytes that would be moved"
    return ""


def _even(units: int, ranks: int) -> bool:
    """Whether pieces of `units`, rounded up and the last one shorter, are near each other, and none is empty."""
    largest = -(-units // ranks)
    return ranks * largest <= LARGEST_SHARE * units and (ranks - 1) * largest < units


def _shown(split: ParameterSplit) -> str:
    return f"{split.outer} x {split.units} x {split.inner}"


def _excluded(derivation: Derivation, patterns: Iterable[str]) -> dict[str, str]:
    """First name of each parameter that stays whole -> the pattern that says so."""
    kept: dict[str, str] = {}
    unknown: list[str] = []
    for pattern in patterns:
        matching = [name for name in derivation.aliases if fnmatchcase(name, pattern)]
        kept.update({derivation.aliases[name]: pattern for name in matching})
        if not matching:
            close = get_close_matches(pattern, derivation.aliases, n=3, cutoff=0.4)
            unknown.append(f"no parameter is named {pattern!r}" + (f"; close: {', '.join(close)}" if close else ""))
    if unknown:
        raise PlanError("keeping parameters whole by pattern", "; ".join(unknown), "see model.named_parameters()")
    return kept

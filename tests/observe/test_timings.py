"""When communication is under way and when a rank waits for it, from times that were noted; pure."""

from __future__ import annotations

import pytest

from evenly.observe.timings import Communication, Timing, UnderWay, communication, covered, mean_by_axis, messages
from evenly.plan.schedule import ActionSpan


def timing(complete_s: float | None, waited_from_s: float | None, ended_s: float | None) -> Timing:
    return Timing("all_reduce", "data", "", 1.0, complete_s, waited_from_s, ended_s)


@pytest.mark.parametrize(
    ("noted", "expected"),
    [
        (timing(3.0, 5.0, 5.1), UnderWay(1.0, 3.0, 3.0)),  # complete before anybody waited
        (timing(6.0, 5.0, 6.5), UnderWay(1.0, 5.0, 6.5)),  # the rank knows of it once it wakes up
        (timing(None, 5.0, 6.5), UnderWay(1.0, 5.0, 6.5)),
        (timing(None, 1.0, 6.5), UnderWay(1.0, 1.0, 6.5)),  # waited for at once
        (timing(3.0, None, None), UnderWay(1.0, 3.0, 3.0)),  # never waited for in this step
        (timing(None, None, None), None),
    ],
)
def test_an_operation_is_under_way_until_it_is_complete_or_the_wait_for_it_ends(
    noted: Timing, expected: UnderWay | None
) -> None:
    assert noted.under_way() == expected


def test_seconds_in_which_several_are_under_way_count_once() -> None:
    found = communication([UnderWay(0.0, 4.0, 5.0), UnderWay(1.0, 5.0, 7.0), UnderWay(9.0, 9.5, 9.5)])
    assert found == Communication(7.5, 3.0)
    assert communication([]) == Communication(0.0, 0.0)
    assert covered([(3, 4), (0, 2), (1, 3.5), (6, 6)]) == 4.0 and covered([]) == 0.0


def span(kind: str, stage: int, begin_s: float, end_s: float, arrived_s: float | None = None) -> ActionSpan:
    return ActionSpan(kind, stage, 0, begin_s, end_s, arrived_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        ((5.0, 5.1, 3.0), UnderWay(2.0, 3.0, 3.0)),  # there before the receiver asks
        ((2.5, 3.5, 3.0), UnderWay(2.0, 2.5, 3.0)),  # what follows is no message
        ((0.0, 3.5, 3.0), UnderWay(2.0, 2.0, 3.0)),  # before it is sent the receiver waits for the stage before it
        ((2.5, 3.5, None), UnderWay(2.0, 2.5, 3.5)),
        ((0.0, 1.0, 0.9), UnderWay(2.0, 2.0, 2.0)),  # of two clocks that differ
    ],
)
def test_a_message_is_under_way_from_its_sender_s_begin(
    received: tuple[float, float, float | None], expected: UnderWay
) -> None:
    sent = [span("send_forward", 0, 2.0, 2.1), span("send_backward", 2, 2.0, 2.1), span("forward", 0, 0.0, 2.0)]
    for kind in ("recv_forward", "recv_backward"):
        assert messages([span("forward", 1, 6.0, 7.0), span(kind, 1, *received)], sent) == [expected]
    assert messages([span("recv_forward", 3, *received)], sent) == []  # whose send was not recorded


def test_the_mean_is_over_all_ranks() -> None:
    found = mean_by_axis(
        [{"data": Communication(4.0, 1.0), "pipeline": Communication(1.0, 1.0)}, {"data": Communication(0.0, 0.0)}]
    )
    assert found == {
        "data": {"under_way_s": 2.0, "waited_s": 0.5, "hidden": 0.75},
        "pipeline": {"under_way_s": 0.5, "waited_s": 0.5, "hidden": 0.0},
    }
    assert mean_by_axis([{}, {}]) == {}
    assert mean_by_axis([{"data": Communication(0.0, 0.0)}])["data"]["hidden"] == 0.0

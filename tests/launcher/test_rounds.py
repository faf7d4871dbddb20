"""Who takes part in a run on several nodes is decided from what is known of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from evenly.errors import UserError
from evenly.launcher.restarts import Failure
from evenly.launcher.rounds import (
    Limits,
    Member,
    NodeRange,
    Report,
    Round,
    View,
    as_failure,
    judge,
    next_action,
    pause_after,
)

LIMITS = Limits(join_s=300, last_call_s=30, settle_s=3, end_s=60)
A, B, C = (Member(node, f"token{node}", f"host{node}", devices=2) for node in range(3))
DONE = Report(how="done", exit_code=0)
ENDED = Report(how="ended")
STOPPED = Report(how="stopped")
LEFT = Report(how="left", signum=15)
RAISED = Report(
    how="failed",
    asked="rank 3 failed at step 7",
    found="ValueError: no",
    rank=3,
    step=7,
    traceback="...\nValueError: no",
)
KILLED = Report(how="failed", asked="rank 2 failed", found="it was killed by SIGKILL", rank=2, kind="killed")
PEER = Report(how="failed", asked="rank 0 failed", found="it lost another rank", rank=0, kind="peer", traceback="...")
MISTAKE = Report(how="failed", asked="plan ddp", found="no", exit_code=2)
SIGNALLED = Report(how="failed", asked="the run was stopped", exit_code=130, kind="interrupted")


def between(nodes: str, *present: Member, now_s: float = 0.0, **known: object) -> View:
    return replace(View(NodeRange.parse(nodes), now_s, {one.node: one for one in present}, limits=LIMITS), **known)  # type: ignore[arg-type]


def within(*present: Member, nodes: str = "2:3", of: tuple[Member, ...] = (A, B, C), **known: object) -> View:
    return between(nodes, *present, **{"round": Round(0, of), "began": True, **known})


# -------------------------------------------------------------------------------------------------- between rounds
def test_a_round_begins_with_all_nodes_at_once() -> None:
    assert next_action(between("3", A, B, C)) == "begin"
    assert next_action(between("2:3", A, B, C)) == "begin"


def test_fewer_nodes_begin_after_a_last_call_and_later_at_once() -> None:
    assert next_action(between("2:3", A, B, now_s=129, enough_s=100)) == "wait"
    assert next_action(between("2:3", A, B, now_s=130, enough_s=100)) == "begin"
    assert next_action(between("2:3", A, B, now_s=101, enough_s=100, began=True)) == "begin"
    assert next_action(between("3", A, B, now_s=299, began=True)) == "wait"


def test_nodes_that_do_not_come_are_named_after_a_limit() -> None:
    assert next_action(between("4", A, C, now_s=299)) == "wait"
    late = next_action(between("4", A, C, now_s=300))
    assert isinstance(late, Report) and (late.how, late.exit_code) == ("failed", 2)
    assert late.found == "nodes 1, 3 did not come within 300 s"
    lost = next_action(between("2:3", A, now_s=1301, since_s=1000, not_before_s=1001, began=True))
    assert isinstance(lost, Report) and lost.found.startswith("nodes 1, 2 did not") and lost.exit_code == 1
    assert next_action(between("2:3", A, now_s=1300, since_s=1000, not_before_s=1001, began=True)) == "wait"


def test_a_pause_is_kept_and_a_stop_ends_the_run() -> None:
    assert next_action(between("3", A, B, C, now_s=9, not_before_s=10, began=True)) == "wait"
    assert next_action(between("3", A, B, C, now_s=10, not_before_s=10, began=True)) == "begin"
    stopped = next_action(between("3", A, B, C, signum=15))
    assert isinstance(stopped, Report) and (stopped.how, stopped.signum) == ("stopped", 15)


# --------------------------------------------------------------------------------------------------- within a round
def test_a_round_goes_on_while_all_is_well_and_is_over_when_all_have_reported() -> None:
    assert next_action(within(A, B, C)) == "wait"
    assert next_action(within(A, B, C, reports={0: DONE})) == "wait"
    assert next_action(within(A, B, C, reports={0: DONE, 1: DONE, 2: DONE})) == "over"
    assert next_action(within(A, B, reports={0: DONE, 1: DONE, 2: DONE})) == "over"  # it left when it had reported


def test_a_node_that_is_gone_ends_the_round_at_once() -> None:
    assert next_action(within(A, C)) == "end"
    again = replace(B, token="another")  # its launcher was started again before it was missed
    assert next_action(within(A, again, C)) == "end"
    assert next_action(within(A, C, reports={0: PEER}, failed_s=0)) == "end"


def test_a_failure_ends_the_round_and_one_that_has_a_cause_elsewhere_a_little_later() -> None:
    assert next_action(within(A, B, C, reports={1: RAISED}, failed_s=0)) == "end"
    assert next_action(within(A, B, C, reports={0: PEER}, failed_s=0, now_s=2)) == "wait"
    assert next_action(within(A, B, C, reports={0: PEER, 1: KILLED}, failed_s=0, now_s=2)) == "end"
    assert next_action(within(A, B, C, reports={0: PEER}, failed_s=0, now_s=3)) == "end"


def test_ranks_have_so_long_to_end() -> None:
    ending = within(A, B, C, reports={1: RAISED, 0: ENDED}, failed_s=0, ending_s=0.0)
    assert next_action(replace(ending, now_s=60)) == "wait"
    assert next_action(replace(ending, now_s=61)) == "over"
    assert next_action(replace(ending, reports={1: RAISED, 0: ENDED, 2: PEER})) == "over"
    assert next_action(within(A, B, reports={0: ENDED, 1: ENDED}, ending_s=0.0)) == "over"


def test_a_node_that_comes_has_the_round_pause_once() -> None:
    assert next_action(within(A, B, C, of=(A, B))) == "pause"
    assert next_action(within(A, B, C, of=(A, B), pausing=True)) == "wait"
    assert next_action(within(A, B, C, of=(A, B), signum=2)) == "wait"
    assert next_action(within(A, B, C, of=(A, B), reports={1: RAISED}, failed_s=0)) == "end"
    assert next_action(within(A, B, C, of=(A, B), reports={1: PEER}, failed_s=0)) == "wait"


# ------------------------------------------------------------------------------------------------------------ ends
@pytest.mark.parametrize(
    ("reports", "known", "how"),
    [
        ([DONE, DONE, DONE], {}, "done"),
        ([DONE, DONE, DONE], {"signum": 2}, "done"),
        ([DONE, STOPPED, STOPPED], {"pausing": True}, "paused"),
        ([STOPPED, STOPPED, STOPPED], {"pausing": True, "signum": 2}, "stopped"),
        ([STOPPED, STOPPED, STOPPED], {}, "stopped"),
        ([STOPPED, STOPPED, LEFT], {}, "paused"),
        ([PEER, STOPPED, LEFT], {}, "paused"),
        ([KILLED, STOPPED, LEFT], {}, "failed"),
        ([STOPPED, LEFT, LEFT], {"signum": 15}, "stopped"),
        ([PEER, SIGNALLED, ENDED], {}, "stopped"),
        ([PEER, KILLED, ENDED], {"signum": 2}, "stopped"),
        ([PEER, RAISED, KILLED], {"pausing": True}, "failed"),
    ],
)
def test_how_a_round_has_ended(reports: list[Report], known: dict[str, object], how: str) -> None:
    assert judge(within(A, B, C, reports=dict(enumerate(reports)), **known)).how == how


def test_the_signal_of_a_stop_is_known_from_whoever_had_it() -> None:
    assert judge(within(A, B, C, reports={0: PEER, 1: SIGNALLED, 2: ENDED})).signum == 2
    assert judge(within(A, B, C, reports={0: STOPPED, 1: STOPPED, 2: STOPPED}, signum=15)).signum == 15


def test_the_first_failure_is_the_one_with_no_cause_elsewhere() -> None:
    assert judge(within(A, B, C, reports={0: PEER, 1: RAISED, 2: ENDED})) is RAISED
    assert judge(within(A, B, C, reports={0: RAISED, 1: KILLED, 2: PEER})) is KILLED
    assert judge(within(A, B, C, reports={0: ENDED, 1: PEER, 2: ENDED})) is PEER
    assert judge(within(A, B, reports={0: RAISED, 1: ENDED})) is RAISED  # and then node 2 was gone too
    assert judge(within(A, B, C, reports={0: MISTAKE, 1: PEER, 2: ENDED})) is MISTAKE


def test_a_lost_node_is_named() -> None:
    lost = judge(within(A, B, reports={0: PEER, 1: ENDED}))
    assert lost.lost and lost.asked == "node 2 (host2) is gone" and "killed, or cannot be reached" in lost.found
    both = judge(within(A, reports={0: ENDED}))
    assert both.asked == "node 1 (host1) and node 2 (host2) are gone"
    deaf = judge(within(A, B, C, reports={0: PEER, 1: ENDED}))
    assert deaf.lost and "has not ended its ranks within 60 s" in deaf.found


# -------------------------------------------------------------------------------------------------------- restarts
LOST = Report(how="failed", asked="node 2 is gone", lost=True)


def after(*reports: Report, restarts: int, elastic: bool, step: int | None = None) -> float | Report:
    failures = [as_failure(one, 10.0 * number, step, elastic=elastic) for number, one in enumerate(reports)]
    return pause_after(failures, reports[-1], restarts=restarts, elastic=elastic)


def test_an_elastic_run_goes_on_without_a_node_and_others_where_restarts_were_asked_for() -> None:
    assert after(LOST, restarts=0, elastic=True) == 1
    assert after(LOST, restarts=0, elastic=False) is LOST
    assert after(LOST, restarts=1, elastic=False) == 1
    assert isinstance(after(LOST, LOST, restarts=1, elastic=False), Report)


def test_the_loss_of_nodes_uses_up_no_restart_of_an_elastic_run_but_makes_it_wait() -> None:
    assert after(*[LOST] * 5, restarts=0, elastic=True) == 16
    assert after(LOST, LOST, KILLED, restarts=1, elastic=True) == 4
    assert after(KILLED, LOST, restarts=1, elastic=True) == 2
    ended = after(LOST, KILLED, KILLED, restarts=1, elastic=True)
    assert isinstance(ended, Report) and "2 failures within an hour, and --restarts 1" in ended.do


def test_failures_of_ranks_are_restarted_where_that_was_asked_for() -> None:
    assert after(KILLED, restarts=0, elastic=True) is KILLED
    assert after(KILLED, restarts=1, elastic=True) == 1
    assert after(MISTAKE, restarts=9, elastic=True) is MISTAKE
    assert after(PEER, PEER, restarts=9, elastic=False) == 2  # what it says is alike each time


def test_the_same_error_in_the_same_step_ends_it_whichever_rank_has_it() -> None:
    other = replace(RAISED, asked="rank 1 failed at step 7", rank=1)
    ended = after(RAISED, LOST, other, restarts=9, elastic=True)
    assert isinstance(ended, Report) and "the same error in the same step came before" in ended.do
    assert after(RAISED, replace(RAISED, step=9), restarts=9, elastic=True) == 2
    assert as_failure(RAISED, 1.0, 4, elastic=True) == Failure(1.0, 4, "step 7: ValueError: no")


# ----------------------------------------------------------------------------------------------------------- texts
@pytest.mark.parametrize("text", ["", "0", "0:2", "3:2", "2:", ":2", "-1", "2:x", "1:2:3", "9" * 30, "٢"])
def test_numbers_of_nodes_that_are_none(text: str) -> None:
    with pytest.raises(UserError):
        NodeRange.parse(text)


def test_numbers_of_nodes() -> None:
    assert NodeRange.parse("4") == NodeRange(4, 4) and not NodeRange.parse("4").elastic
    assert NodeRange.parse("2:4") == NodeRange(2, 4) and str(NodeRange.parse("2:4")) == "2 to 4"


def test_what_launchers_write_is_what_they_read() -> None:
    found = Round(3, (A, C), resume=True, folder="runs/x", mark=".nodes-1")
    assert Round.from_text(found.to_text()) == found
    assert Report.from_text(RAISED.to_text().encode()) == RAISED
    assert Member.from_text(B.to_text()) == B
    assert math.inf == View(NodeRange(), 0.0, {}).failed_s


def test_ranks_are_numbered_over_the_nodes_of_a_round() -> None:
    found = Round(3, (A, replace(C, devices=3))).part("token2", port=1, interface="lo")
    assert found.variables(1) == {
        "RANK": "3",
        "ROLE_RANK": "3",
        "WORLD_SIZE": "5",
        "ROLE_WORLD_SIZE": "5",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "TORCHELASTIC_RESTART_COUNT": "3",
    }

"""`evenly run` as one of the ranks that torchrun, srun or mpirun has started: a run, and one error where it fails."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from evenly.cli.run import (
    ReadRequest,
    RunRequest,
    choose_folder,
    exit_code,
    print_summary,
    read_request,
    run_options,
    with_autoresume,
    with_way_on,
)
from evenly.errors import UserError
from evenly.launcher.agent import FailedRank
from evenly.launcher.environment import (
    CHECK_VARIABLE,
    OPTIONS_VARIABLE,
    ProcessInfo,
    changed_environment,
    import_quiet_torch,
    restart_count,
)
from evenly.launcher.parent import end_with_parent
from evenly.launcher.rank import EXIT_STOPPED, LINGER_S, RankExit, describe
from evenly.observe.run_folder import RunFolder

if TYPE_CHECKING:
    from evenly.comm.last_words import LastWords
    from evenly.train.options import RunOptions


def run_as_rank(request: RunRequest, place: ProcessInfo) -> int:
    """Trains as the rank at `place`; the exit code. Where ranks fail one of them raises, and the others exit alike."""
    if place.launcher != "torchrun":
        end_with_parent()
    ended: list[int] = []
    # The last of all that is done at exit: threads of torch now and then abort the interpreter's way out, and what has
    # started the ranks takes the run for one that failed.
    atexit.register(lambda: [*map(_end_at_once, ended)])
    try:
        _check(request, place)
        import_quiet_torch()
        ended.append(_run(request, place))
        return ended[0]
    except (Exception, KeyboardInterrupt) as error:
        found = describe(place.rank, error)
        said = _to_say(found, place)
        signal.signal(signal.SIGTERM, signal.SIG_IGN if said else signal.SIG_DFL)
        # Threads of torch may still wait for ranks that are gone: the interpreter's way out would abort over them.
        atexit.register(_end_at_once, found.exit_code)
        if said is None:
            time.sleep(LINGER_S)  # the launcher ends all ranks where the first has ended
            raise SystemExit(found.exit_code) from error
        failed = FailedRank(*said, rank=found.rank, exit_code=found.exit_code, traceback=found.traceback)
        failed.do = "; ".join(filter(None, (failed.do, _keep_traceback(found, request.out))))
        failed.do = with_way_on(failed, request, request.out)
        raise failed from error


def _end_at_once(code: int) -> None:
    """Ends this process with what it has printed so far."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(request: RunRequest, place: ProcessInfo) -> int:
    asked = read_request(request)
    if restart_count() and request.out is not None:
        request = replace(request, autoresume=True)  # torchrun has started the ranks again
    request = with_autoresume(request)
    out = request.out if asked.script else choose_folder(request)  # which raises on all ranks alike
    if request.out is None and place.rank > 0:
        out = None  # the first rank's counts
    options = run_options(request, asked, out)
    variables = {OPTIONS_VARIABLE: options.to_text()} if asked.script else {}
    with changed_environment({**variables, **({CHECK_VARIABLE: "1"} if request.check else {})}):
        return _train(request, asked, options, place)


def _train(request: RunRequest, asked: ReadRequest, options: RunOptions, place: ProcessInfo) -> int:
    from evenly.train.interrupt import Interrupt
    from evenly.train.loop import run_job_file, run_script

    if asked.script:
        signum = run_script(request.job, request.json_only)
        return exit_code(signum != 0, signum)
    summary = run_job_file(request.job, asked.settings, options, request.json_only)
    if place.rank == 0:
        print_summary(summary, request)
    return exit_code(summary.stopped, Interrupt.was_asked)


def _check(request: RunRequest, place: ProcessInfo) -> None:
    """Raises `UserError` where the command asks for what only a launcher of evenly's can do."""
    asked = {
        "--restarts": bool(request.restarts),
        "elastic --nodes": request.nodes.elastic,
        "--stall-limit": request.stall_limit_s is not None,
        "--snapshot": request.snapshot is not None,
        f"--devices {request.devices}": request.devices not in (None, place.local_size),
    }
    if any(asked.values()):
        raise UserError(
            f"{' and '.join(name for name, found in asked.items() if found)} in a rank",
            f"{place.launcher} has started all {place.size} ranks, {place.local_size} of them here, and watches them",
            "leave that to it (torchrun --max-restarts), or have it start one task per node",
        )


def _keep_traceback(found: RankExit, out: Path | None) -> str:
    """Writes the traceback of what is no mistake to the rank's log, or to stderr without a folder; where it is."""
    if found.exit_code == UserError.exit_code or found.kind == "peer":
        return ""
    if out is None:
        print(found.traceback, file=sys.stderr)
        return ""
    log = RunFolder(out).logs / f"rank{found.rank}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write(found.traceback)
    return f"see its log: {log}"


# ----------------------------------------------------------------------------------------------------- who speaks
Said = tuple[str, str, str]  # what was asked, what was found, what to do
LOST = "one of them"


def _to_say(found: RankExit, place: ProcessInfo) -> Said | None:
    """What this rank, which has ended so, says of the run; None where another does."""
    from torch.distributed import DistError

    from evenly.comm.connect import MEET_LIMIT_S, last_words
    from evenly.train.interrupt import Interrupt

    if Interrupt.was_asked > 0 and found.kind in ("peer", "interrupted"):
        raise SystemExit(EXIT_STOPPED + Interrupt.was_asked)  # the launcher ends all ranks, and says why
    words = last_words(place)
    if words is None:
        return _own_failure(found)
    try:
        if found.kind == "peer":
            return _lost_one(place, words)
        speaks = words.speaks(found.text)
        if place.rank == 0 and (found.is_mistake or found.cause is not None):  # which all ranks find
            words.wait_for_others(MEET_LIMIT_S)
        return _own_failure(found) if speaks else None
    except DistError:  # the first rank has the store
        gone = "rank 0 is gone", "it has failed or was killed, and the store of the ranks with it", ""
        return _own_failure(found) if found.kind != "peer" else gone if place.rank == 1 else None


def _own_failure(found: RankExit) -> Said:
    if found.is_mistake:
        return found.asked, found.found, found.do
    rank = found.rank if found.cause is None else found.cause
    return f"rank {rank} failed{_at(found)}", found.text, found.do


def _lost_one(place: ProcessInfo, words: LastWords) -> Said | None:
    if words.anything_said(LINGER_S) or not words.speaks(LOST):
        return None
    found = "it has left no error: killed, perhaps for want of memory, or cut off"
    return "the ranks lost one of them", found, f"see which one {place.launcher} reports first"


def _at(found: RankExit) -> str:
    return "" if found.step is None else f" at step {found.step}"

"""Workers of Ray Train as ranks: where each stands among them, and what it runs. The only file that imports Ray.

Ray's controller starts a process for each worker, asks them what they are (`RankBackend.on_start`) and gives each its
place; then each runs `RayTask` in a thread. It makes no process group, as `TorchConfig` would: a run makes its own.
Ray Train restarts nothing by itself where a worker fails, since it would do so over mistakes too: the driver decides.
"""

# Ray is installed where it is used.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import pickle
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig, TorchTrainer

from evenly.comm.doctor_nodes import NEEDED_ALIKE, versions_here
from evenly.errors import EvenlyError, RunError
from evenly.launcher.agent import FailedRank
from evenly.launcher.environment import ProcessInfo, changed_environment, process_environment
from evenly.launcher.rank import EXIT_STOPPED, LINGER_S, describe
from evenly.launcher.rounds import NodeRange
from evenly.launcher.shared_folder import sees_mark
from evenly.launcher.signals import handled
from evenly.ray.failures import FailedWorker, first_failure
from evenly.ray.places import WorkerFacts, check_workers, places_of
from evenly.train.loop import Summary
from evenly.train.no_room import newest_step
from evenly.train.options import RunOptions

# Workers stay in the folder that they were started in, where a job's relative paths lead; what they print comes once.
OF_RAY_TRAIN = {"RAY_CHDIR_TO_TRIAL_DIR": "0", "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
# Seconds until Ray counts again how many workers there is room for: it learns late that a node is lost.
OF_ELASTIC_RUNS = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20"}

_places: list[ProcessInfo] = []  # of this worker: Ray's controller puts it there before the task runs


@dataclass
class RanksConfig(TorchConfig):
    """Of workers that are ranks; mark: a file of the driver's in the run's folder."""

    mark: str = ""

    @property
    def backend_cls(self) -> Any:
        return RankBackend

    @property
    def train_func_context(self) -> Any:
        return nullcontext


class RankBackend(Backend):
    """Gives each worker its place; each sees all GPUs that Ray has given to this run on its node."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Raises `UserError` for workers that cannot be ranks of one run."""
        mark = Path(backend_config.mark)
        workers: list[WorkerFacts] = worker_group.execute(facts_of_worker, mark)
        check_workers(workers, mark.parent)
        places = places_of(workers)
        ray.get([worker_group.execute_single_async(place.rank, take_place, place) for place in places])

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Leaves all as it is: the processes end."""


def facts_of_worker(mark: Path) -> WorkerFacts:
    context = ray.train.get_context()
    found = versions_here()
    return WorkerFacts(
        rank=context.get_world_rank(),
        local_rank=context.get_local_rank(),
        local_size=context.get_local_world_size(),
        node=context.get_node_rank(),
        address=ray.util.get_node_ip_address(),
        port=_free_port(),
        versions={name: found.get(name, "missing") for name in NEEDED_ALIKE},
        sees_folder=sees_mark(mark),
    )


def take_place(place: ProcessInfo) -> None:
    """Puts this worker there."""
    _places.append(place)


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


@dataclass(frozen=True)
class RayTask:
    """What each worker does. train: pickled, of the options and the place of this rank."""

    train: bytes
    options: RunOptions

    def __call__(self) -> Summary:
        place = _places[-1]
        try:
            # Ray may have started the workers again, since there are more or fewer: rank 0 looks, for all alike.
            resume = broadcast_from_rank_zero(self.options.resume or newest_step(self.options) is not None)
            return pickle.loads(self.train)(replace(self.options, resume=resume), place)
        except BaseException as error:
            found = describe(place.rank, error)
            if found.kind == "peer":
                time.sleep(LINGER_S)  # Ray looks first at the one that was lost
            raise FailedWorker(found) from error


def connect(*, quiet: bool) -> None:
    """To the cluster that Ray finds, unless this process is connected; quiet: without what workers print."""
    if not ray.is_initialized():
        ray.init(log_to_driver=not quiet)


def fit(
    task: RayTask, number: NodeRange, mark: Path, *, gpus: bool | None, resources: Mapping[str, float] | None
) -> Summary:
    """Runs the task on so many workers. Raises `FailedRank` where one fails, `UserError` where they cannot be ranks."""
    run = ray.train.RunConfig(
        name=mark.parent.name,
        storage_path=str(mark.parent / "ray"),
        failure_config=ray.train.FailureConfig(max_failures=0),
        logging_config=ray.train.LoggingConfig(log_level="ERROR" if task.options.quiet else "INFO"),
    )
    scaling = ray.train.ScalingConfig(
        num_workers=(number.least, number.most) if number.elastic else number.most,
        use_gpu=ray.cluster_resources().get("GPU", 0) > 0 if gpus is None else gpus,
        resources_per_worker=None if resources is None else dict(resources),
    )
    trainer = TorchTrainer(task, torch_config=RanksConfig(mark=str(mark)), scaling_config=scaling, run_config=run)
    try:
        return _fit(trainer, OF_RAY_TRAIN | (OF_ELASTIC_RUNS if number.elastic else {})).return_value
    except ray.train.WorkerGroupError as failed:
        raise first_failure(failed.worker_failures) from None
    except ray.train.ControllerError as failed:
        found = failed.controller_failure
        if isinstance(found, EvenlyError):
            raise found from None
        raise RunError("a run on workers of Ray", str(found).strip(), "see the logs of Ray Train") from failed
    except SystemExit:  # Ray's answer to Ctrl-C
        raise FailedRank(
            "the run was stopped by SIGINT",
            "Ray has ended its workers",
            "it goes on from its newest checkpoint",
            rank=None,
            exit_code=EXIT_STOPPED + signal.SIGINT,
            kind="interrupted",
        ) from None


def _fit(trainer: TorchTrainer, variables: Mapping[str, str]) -> Any:
    with ExitStack() as stack:
        stack.enter_context(changed_environment({**variables, **process_environment()}))
        if threading.current_thread() is threading.main_thread():  # whose handler of Ctrl-C Ray replaces
            stack.enter_context(handled([signal.SIGINT], signal.default_int_handler))
        return trainer.fit()

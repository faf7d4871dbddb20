"""MLflow."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from evenly.observe.loggers.logger import KeptRun, LoggedRun, Logger, LogRow, first_line, flat_config, plain_name

# What one request may hold.
MOST_PARAMS, LONGEST_PARAM, MOST_METRICS = 100, 500, 1000


class MLFlowLogger(Logger):
    """Logs to a run of `experiment` in MLflow.

    tracking_uri: where; by default what MLFLOW_TRACKING_URI says, else a database in the run's folder, `mlflow.db`.

    A run that goes on goes on there too, under the same id. Raises `UserError` where packages are missing.
    """

    name = "mlflow"
    packages = ("mlflow", "sqlalchemy", "alembic")
    pip = "mlflow-skinny sqlalchemy alembic"

    def __init__(self, experiment: str, *, tracking_uri: str | None = None) -> None:
        super().__init__()
        self._experiment, self._tracking_uri = experiment, tracking_uri

    def open(self, run: LoggedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_BACKOFF_JITTER

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        # Else what is asked again draws from Python's random numbers, which are those of the job's samples.
        MLFLOW_HTTP_REQUEST_BACKOFF_JITTER.set(0)
        self._kept = KeptRun(run.kept(self.name), self._experiment)
        self._client: Any = MlflowClient(tracking_uri=self._uri(run))
        if self._kept.id is None:
            self._kept.id = self._started(run)
            self._kept.note(())
        else:
            self._client.update_run(self._kept.id, status="RUNNING")

    def _uri(self, run: LoggedRun) -> str | None:
        import mlflow

        if self._tracking_uri is not None or run.out is None or mlflow.is_tracking_uri_set():
            return self._tracking_uri
        return f"sqlite:///{run.out.resolve() / 'mlflow.db'}"

    def _started(self, run: LoggedRun) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found is not None else self._created()
        started = self._client.create_run(experiment, run_name=run.name).info.run_id
        config = flat_config(run.config).items()
        params = [Param(plain_name(name), str(value)[:LONGEST_PARAM]) for name, value in config]
        for begin in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(started, params=params[begin : begin + MOST_PARAMS])
        return started

    def _created(self) -> str:
        from mlflow.exceptions import MlflowException

        try:
            return self._client.create_experiment(self._experiment)
        except MlflowException as problem:  # another run may have been as quick
            found = self._client.get_experiment_by_name(self._experiment)
            if found is None:
                raise RuntimeError(first_line(problem)) from problem
            return found.experiment_id

    def add(self, rows: Sequence[LogRow]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(plain_name(name), value, int(row.time_s * 1000), row.step)
            for row in rows
            for name, value in self._kept.left(row).items()
        ]
        for begin in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._kept.id, metrics=metrics[begin : begin + MOST_METRICS])
        self._kept.note(rows)

    def finish(self, *, failed: bool) -> None:
        self._client.set_terminated(self._kept.id, "FAILED" if failed else "FINISHED")

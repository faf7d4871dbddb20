"""Runs of a job by Ray Train: each of its workers is a rank. Needs `pip install "evenly[ray]"`.

    import evenly.ray
    summary = evenly.ray.run(job, workers=8, plan="zero3", out="/shared/runs/mine", failures=5)

Ray places the workers. Where one fails or its node is lost all are started again, and the run goes on from its newest
sound checkpoint, which is in `out`, on storage that all nodes see.

    driver -> workers.fit -> Ray's controller: `places` -> each worker: the job's run -> `failures`, where one fails
"""

from evenly.ray.driver import RayWorkers, run, train_on_workers

__all__ = ["RayWorkers", "run", "train_on_workers"]

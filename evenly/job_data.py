"""What `data` of a job is: a data set, a stream, or a DataLoader that stands for several fields."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def is_a(value: object, name: str) -> bool:
    """Return whether `value` is of a class of this name, or of one that is made of it."""
    return any(one.__name__ == name for one in type(value).__mro__)


def is_stream(data: object) -> bool:
    """Return whether `data` is read in its own order, from the start for every epoch, and has no samples by index."""
    if is_a(data, "IterableDataset"):  # it has torch's __getitem__, which raises
        return True
    return not hasattr(data, "__getitem__") and (hasattr(data, "__iter__") or callable(data))


def taken_over(job: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that the DataLoader of `job` stands for, and what of it cannot be kept."""
    loader: Any = job.data
    streams = is_stream(loader.dataset)
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or job.global_batch
    fields = {"data": loader.dataset, "global_batch": job.global_batch or size}
    if not streams:
        fields["batch_sampler"] = loader.batch_sampler
        if loader.generator is not None and loader.batch_sampler is not None:
            from torch.utils.data import DataLoader, Dataset

            # A loader of indices: as an epoch begins it draws a number of its generator too.
            keys: Any = type("Keys", (Dataset,), {"__getitem__": lambda _, key: key})()  # pyright: ignore
            options: Any = {"collate_fn": list, "generator": loader.generator}
            fields["batch_sampler"] = DataLoader(keys, batch_sampler=loader.batch_sampler, **options)
    for field, usual in {"num_workers": 0, "pin_memory": False, "prefetch_factor": None}.items():
        if getattr(job, field) is None and getattr(loader, field) != usual:
            fields[field] = getattr(loader, field)
    problems: list[str] = []
    if getattr(loader.collate_fn, "__name__", "") != "default_collate":
        fields["collate"] = loader.collate_fn
    if loader.batch_size is None and (streams or loader.batch_sampler is None):
        problems.append("the DataLoader has batch_size=None: its samples are batches already; give its dataset")
    if not 0 < size == fields["global_batch"]:
        problems.append(f"the DataLoader has batches of {size} samples, and global_batch is {fields['global_batch']}")
    if loader.worker_init_fn is not None:
        problems.append("the DataLoader has a worker_init_fn, which no rank would call; let the dataset do it")
    if streams and loader.drop_last:
        problems.append("the DataLoader has drop_last, and every sample of a stream is trained on")
    for field in ("sampler", "batch_sampler", "collate"):
        if getattr(job, field) is not None and (field in fields or (field == "sampler" and not streams)):
            problems.append(f"{field} is given, and the DataLoader has one")
    return fields, problems


def stream_problems(field: str, data: object) -> Iterable[str]:
    """Yield why `data` cannot be read as a stream."""
    if hasattr(data, "__next__"):
        yield (
            f"{field} is a {type(data).__name__}, which can be read once: give the function that makes it, without "
            "calling it"
        )
    stages: Any = getattr(data, "pipeline", ())
    for stage in stages if isinstance(stages, list) else ():
        kept: dict[str, Any] = getattr(stage, "kw", {})
        name = getattr(getattr(stage, "f", None), "__name__", "")
        if name.strip("_") == "shuffle" and not kept.keys() & {"seed", "rng"}:
            yield (
                f"{field} is shuffled by webdataset without a seed, in another order in every run; give "
                "shuffle_buffer= to the job in place of .shuffle, or .shuffle(size, seed=...)"
            )

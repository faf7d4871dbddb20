"""Several ranks on one device, held against one: plans that no single GPU has otherwise.

NCCL refuses one GPU for two ranks. They talk over gloo, from the host's memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import evenly
from benchmarks.gpu.models import SMALL_GPT2, language_case
from evenly.errors import PlanError
from evenly.launcher.agent import Launch, start_ranks
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, keep_reference
from evenly.verify.trajectory import measure_rounding, trajectory_folder

STEPS, DEVICE = 2, "cuda:0"
# What a rank sends to one other would be waited for before it is sent: no pipeline.
PLANS = ("ddp", "zero1", "zero2", "zero3", "tensor=2")
REFUSED = ("zero3",) if torch.__version__ < "2.13" else ()


class ThroughHost(TorchDispatchMode):
    """Within, collectives of tensors on a GPU run on copies of them on the host, and are done at once."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # an operation of parts of tensors, whatever they stand for
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        there = [one for one in flat if isinstance(one, torch.Tensor) and one.is_cuda]
        if func.namespace not in ("c10d", "_c10d_functional") or not there:
            return func(*args, **kwargs)
        here = {id(one): one.cpu() for one in there}
        plain = [here.get(id(one), torch.device("cpu") if isinstance(one, torch.device) else one) for one in flat]
        plain_args, plain_kwargs = tree_unflatten(plain, spec)
        result = func(*plain_args, **plain_kwargs)
        for one in tree_flatten(result)[0]:
            if func.namespace == "_c10d_functional" and isinstance(one, torch.Tensor):
                torch.ops._c10d_functional.wait_tensor(one)
            elif isinstance(one, torch.ScriptObject):
                dist.Work.unbox(one).wait()  # pyright: ignore[reportAttributeAccessIssue]
        for one in there:
            one.copy_(here[id(one)])
        known = {id(copy): one for one in there if (copy := here[id(one)]) is not None}
        return tree_map(lambda one: _back(one, known), result)


def _back(one: Any, known: dict[int, torch.Tensor]) -> Any:
    return known.get(id(one), one.to(DEVICE)) if isinstance(one, torch.Tensor) else one


@contextmanager
def one_device(*, cpu: bool) -> Iterator[None]:
    """Within, this rank shares the device with all others."""
    if cpu:
        yield
        return
    init = dist.init_process_group

    def over_gloo(backend: str, *, device_id: Any = None, **options: Any) -> None:
        init("gloo", **options)

    with ExitStack() as stack:
        for name in ("evenly.comm.connect.find_device", "evenly.verify.ranks.find_device"):
            stack.enter_context(patch(name, lambda place: DEVICE))
        stack.enter_context(patch.object(dist, "init_process_group", over_gloo))
        stack.enter_context(ThroughHost())
        yield


def make_job() -> evenly.Job:
    return replace(language_case(SMALL_GPT2, 8, 2).job(STEPS), precision="float64")


def reference(folder: Path, *, cpu: bool) -> None:
    """What the plain loop computes on the device."""
    for kind in ("none", "sums"):
        target = trajectory_folder(folder, kind)
        keep_reference(make_job(), STEPS, target, kind, device="cpu" if cpu else DEVICE)
    measure_rounding(folder, "sums")


def compare(folder: Path, plans: Sequence[str], *, cpu: bool) -> list[RankComparison | str]:
    """A rank's comparison of each plan with it; why not, where a plan is refused."""
    found: list[RankComparison | str] = []
    for plan in plans:
        with one_device(cpu=cpu):
            try:
                found.append(compare_job(make_job(), plan, STEPS, folder))
            except PlanError as refusal:
                found.append(str(refusal))
    return found


def shared(*, cpu: bool) -> dict[str, Any]:
    """Each plan on two ranks of one device; raises where one differs."""
    environment = {"OMP_NUM_THREADS": "1", **({"CUDA_VISIBLE_DEVICES": ""} if cpu else {})}
    plans = PLANS[:: 4 if cpu else 1]
    with tempfile.TemporaryDirectory(prefix="shared-") as name:
        start_ranks(partial(reference, cpu=cpu), (Path(name),), Launch(devices=1, environment=environment))
        launch = Launch(devices=2, environment=environment)
        found = start_ranks(partial(compare, cpu=cpu), (Path(name), plans), launch)
    by_plan = zip(*(found[rank] for rank in sorted(found)), strict=True)
    rows = [_row(plan, mine) for plan, mine in zip(plans, by_plan, strict=True)]
    if any(row["status"] != ("refused" if row["plan"] in REFUSED else "equal") for row in rows):
        raise RuntimeError(str(rows))
    return {"ranks": 2, "plans": rows}


def _row(plan: str, found: Sequence[RankComparison | str]) -> dict[str, Any]:
    if refusals := [one for one in found if isinstance(one, str)]:
        return {"plan": plan, "status": "refused", "reason": refusals[0]}
    row = judge(plan, [one for one in found if not isinstance(one, str)])
    return {"plan": plan, "status": row.status, "param_diff": row.param_diff, "reason": row.reason}

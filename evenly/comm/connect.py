"""From a place in the environment to a connected `World`, and back.

Order: `connect` is called once per rank, before the model is built; `disconnect` last. Ranks that agree on their axes
only once they can talk call its halves, `join` and `lay_out`. A world of one rank joins no process group, unless
torch's own sharding is to run in it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from evenly.comm.groups import Group
from evenly.comm.last_words import LastWords
from evenly.comm.world import World
from evenly.errors import EvenlyError, RunError, UserError
from evenly.launcher.allocator import keep_freed_memory
from evenly.launcher.environment import LOOPBACK, ProcessInfo, checking, record_file, restart_count, talk_over
from evenly.launcher.interfaces import local_address, reachable_host, socket_interface, words
from evenly.launcher.rendezvous import serve_store
from evenly.observe.recorder import Recorder

MEET_LIMIT_S = 10.0  # for ranks that have failed before they have met


def find_device(place: ProcessInfo) -> str:
    """The device of this rank: its own GPU where there are any, else the CPU; raises `UserError` beyond them."""
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{own_gpu(place, torch.cuda.device_count())}"


def own_gpu(place: ProcessInfo, found: int) -> int:
    """Which of the `found` GPUs that this process sees is its own; raises `UserError` where there are too few.

    A scheduler may let each task see one alone (`srun --gpus-per-task=1`); NCCL refuses one GPU for two ranks.
    """
    if found == 1 and place.launcher in ("srun", "mpirun", "pmi"):
        return 0
    if place.local_size > found:
        raise UserError(
            f"{place.local_size} devices on this machine",
            f"{found} GPU{'s' * (found != 1)}",
            f"give --devices {found} or fewer; for CPU processes set CUDA_VISIBLE_DEVICES to nothing",
        )
    return place.local_rank


def connect(place: ProcessInfo, *, axes: Mapping[str, int] | None = None, even_alone: bool = False) -> World:
    """Joins the process group of `place` and returns the world as this rank sees it.

    axes:       sizes of the axes of the device mesh, the last one running fastest; without them all is "data".
    even_alone: whether a rank alone has a process group too.

    groups: a `Group` for each axis, "world" of all ranks, and "files" of all ranks over gloo, for checkpoints that are
    written while training goes on: two streams of collectives must never share a group.
    """
    return lay_out(join(place, even_alone=even_alone), axes or {"data": place.size})


def join(place: ProcessInfo, *, even_alone: bool = False) -> World:
    """The world of `connect` with the groups "world" and "files", and no axes yet."""
    if dist.is_initialized():
        raise RunError(
            f"rank {place.rank} of {place.size} joining the others",
            "this process is in a process group already: an earlier run failed in it, or it has made one itself",
            "start a new process, and leave the process group to evenly",
        )
    device = find_device(place)
    backend = "nccl" if device.startswith("cuda") else "gloo"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    record = record_file(place.rank)
    recorder = None if record is None else _recorder(record, place.rank)
    if place.size > 1 or even_alone:
        _join(place, backend, device)
    # A rank alone waits for nobody.
    every = Group.world("world", device, recorder if place.size > 1 else None, checked=checking())
    return World(
        rank=place.rank,
        local_rank=place.local_rank,
        size=place.size,
        local_size=place.local_size,
        node=place.node,
        nodes=place.nodes,
        device=device,
        backend=backend,
        groups={"world": every, "files": every.open("files", range(every.size), backend="gloo")},
        recorder=recorder,
    )


def lay_out(world: World, axes: Mapping[str, int]) -> World:
    """`world` with the group of each axis, sizes as `connect` has them; an axis alone has the group of all ranks."""
    every: Group = world.group("world")
    if len(axes) > 1:
        return replace(world, groups={**every.mesh(axes), **world.groups})
    [axis] = axes
    every.rename(axis)
    return replace(world, groups={axis: every, **world.groups})


def disconnect(world: World) -> None:
    """Leaves the process group; safe to call twice."""
    every: Group = world.group("world")
    every.close()
    torch.compiler.set_stance("default")  # as before the run
    if world.recorder is not None:
        world.recorder.close()


def last_words(place: ProcessInfo) -> LastWords | None:
    """What the ranks of this process's world say of its end.

    Where they have not met yet, they do so for it; None where they cannot.
    """
    store = _rendezvous.store
    if store is None:
        try:
            if place.rank > 0 and not dist.is_torchelastic_launched():
                _wait_for_store(place)
            store = _open_store(place)
        except (RuntimeError, OSError, EvenlyError):
            return None
    return LastWords(store, place.rank, place.size)


def _wait_for_store(place: ProcessInfo) -> None:
    """Until rank 0 serves it. Raises `OSError`, where torch's own wait would print its stacks."""
    until_s = time.monotonic() + MEET_LIMIT_S
    while True:
        try:
            socket.create_connection((_host_of(place), place.port), timeout=MEET_LIMIT_S).close()
            return
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)


def _host_of(place: ProcessInfo) -> str:
    return LOOPBACK if place.nodes == 1 else reachable_host(place.address, place.port)


def _recorder(record: Path, rank: int) -> Recorder:
    try:
        return Recorder(record, rank)
    except OSError as problem:
        asked = f"keep the record of rank {rank} in {record}"
        raise RunError(asked, words(problem), "make room there; TMPDIR names another folder") from None


def _join(place: ProcessInfo, backend: str, device: str) -> None:
    try:
        dist.init_process_group(
            backend,
            store=_rendezvous.next(place) if place.size > 1 else dist.HashStore(),
            rank=place.rank,
            world_size=place.size,
            device_id=torch.device(device) if backend == "nccl" else None,
        )
    except (RuntimeError, ValueError) as problem:
        raise RunError(
            f"rank {place.rank} of {place.size} joining the others at {place.address}:{place.port}",
            str(problem).splitlines()[0],
            "see `evenly doctor`; a port that is taken is changed by MASTER_PORT",
        ) from problem


class _Rendezvous:
    """Where ranks find each other: one store as long as the place is the same, with keys of its own each time.

    torch names the keys of every world alike. In a store that outlives a world, as the elastic agent's does, a rank
    that is early for the next would find where the others were in the last, and wait there for ever. It outlives the
    processes too, where the agent starts them again.
    """

    def __init__(self) -> None:
        self._place: tuple[str, int, int, int] | None = None
        self._store: dist.Store | None = None
        self._count = 0

    @property
    def store(self) -> dist.Store | None:
        """The one in use, without the prefix of a world; None before ranks have met."""
        return self._store

    def next(self, place: ProcessInfo) -> dist.Store:
        key = (place.address, place.port, place.rank, place.size)
        if key != self._place or self._store is None:
            self._store = None  # rank 0 serves it: the old one's port is free before the new one's is taken
            self._store = _open_store(place)
            self._place, self._count = key, 0
        self._count += 1
        return dist.PrefixStore(f"attempt {restart_count()} world {self._count}", self._store)


def _open_store(place: ProcessInfo) -> dist.Store:
    """The store of all ranks: the elastic agent's, or one that rank 0 serves, on the interface that leads to them."""
    if dist.is_torchelastic_launched():
        store, _, _ = next(rendezvous("env://", place.rank, place.size))
        return store
    host = _host_of(place)
    talk_over(socket_interface(host, place.port))
    if place.rank > 0:
        return dist.TCPStore(host, place.port, is_master=False)
    address = local_address(host, place.port)
    try:
        return serve_store(address, place.port)[0]
    except OSError as problem:
        raise RuntimeError(f"rank 0 cannot listen at {address} port {place.port}: {words(problem)}") from None


_rendezvous = _Rendezvous()

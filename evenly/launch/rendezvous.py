"""Where the launchers of a run find each other: one store of torch's, which their ranks use too, and nobody else.

    ranks and launcher of node 0  -> the store, on loopback
    those of another node         -> its tunnel, on loopback -> the door of node 0 -> the store

A store answers whoever reaches its port: it has no password. So it listens on loopback alone. Other nodes come in by a
door, which listens on the one interface that leads to them, and lets in who proves to have the secret of the run: door
and tunnel each answer a random number of the other's with an HMAC of it, before anything reaches the store. Nothing is
encrypted.

Gloo and NCCL connect ranks among themselves. They listen on the same interface (`socket_interface`).
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from evenly.errors import UserError
from evenly.launch.environment import LOOPBACK
from evenly.launch.interfaces import local_address, words

JOIN_LIMIT_S = 300.0  # for all nodes to come
GREETING_LIMIT_S = 10.0  # for one that knocks to prove that it knows the secret
NONCE, DIGEST = 32, "sha256"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class NodeRendezvous(RendezvousHandler):
    """Node `node_rank` of `nodes`; with several, the door of node 0 is at host:port. A handler of torch's agent.

    secret: of the run, the same on every node. `next_rendezvous` raises `UserError` where nodes do not come in time.
    """

    nodes: int = 1
    node_rank: int = 0
    host: str = LOOPBACK
    port: int = 0
    secret: bytes = b""
    limit_s: float = JOIN_LIMIT_S
    _relay: Relay | None = field(default=None, init=False)

    def next_rendezvous(self) -> RendezvousInfo:
        store, port = self._serve() if self.node_rank == 0 else self._connect()
        if self.nodes > 1:
            self._await_nodes(store)
        return RendezvousInfo(
            PrefixStore("launchers", store), self.node_rank, self.nodes, RendezvousStoreInfo(LOOPBACK, port)
        )

    def _serve(self) -> tuple[TCPStore, int]:
        store, port = serve_store()
        if self.nodes > 1:

            async def onward() -> Streams:
                return await asyncio.open_connection(LOOPBACK, port)

            self._relay = Relay(self._listen(), onward, lambda streams: _let_in(streams, self.secret))
        return store, port

    def _listen(self) -> socket.socket:
        address = local_address(self.host, self.port)
        try:
            return listen(address, self.port)

        except OSError as problem:
            found = f"node 0 cannot listen at {address} port {self.port}: {problem.strerror}"
            do = "node 0 must run on that host"
            if problem.errno == errno.EADDRINUSE:
                found = f"port {self.port} is taken on this machine"
                do = "give another port on every node, or end what uses this one"
            raise UserError(self._asked, found, do) from None

    def _connect(self) -> tuple[TCPStore, int]:
        self._knock()

        async def onward() -> Streams:
            return await _enter(self.host, self.port, self.secret)

        listener = listen(LOOPBACK)
        port = listener.getsockname()[1]
        self._relay = Relay(listener, onward)
        return TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False), port

    def _knock(self) -> None:
        """Waits until node 0 opens."""
        until = time.monotonic() + self.limit_s
        while True:
            try:
                asyncio.run(_knock(self.host, self.port, self.secret))
                return
            except PermissionError:
                found = f"who listens there, node 0 or another program, has another secret than node {self.node_rank}"
                raise UserError(self._asked, found, "give all nodes the same secret, and a port of their own") from None
            except OSError as problem:
                if time.monotonic() > until:
                    found = (
                        f"node 0 did not answer node {self.node_rank} within {self.limit_s:.0f} s ({words(problem)})"
                    )
                    do = "start every node with the same rendezvous; node 0 must run on that host, its port open to all"
                    raise UserError(self._asked, found, do) from None
            time.sleep(0.2)

    def _await_nodes(self, store: TCPStore) -> None:
        """Waits until all nodes are there."""
        store.set(f"node {self.node_rank}", socket.gethostname())
        until = time.monotonic() + self.limit_s
        while missing := [str(node) for node in range(self.nodes) if not store.check([f"node {node}"])]:
            if time.monotonic() > until:
                found = f"node{'s' * (len(missing) > 1)} {', '.join(missing)} did not come within {self.limit_s:.0f} s"
                raise UserError(self._asked, found, "start every node with the same rendezvous and number of nodes")
            time.sleep(0.1)

    @property
    def _asked(self) -> str:
        return f"meet {self.nodes} nodes at {self.host}:{self.port}"

    def shutdown(self) -> bool:
        if self._relay is not None:
            self._relay.close()
        return True

    # What a rendezvous that is decided beforehand has to say to the agent.
    def get_backend(self) -> str:
        return "evenly"

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return "evenly"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0


def serve_store(address: str = LOOPBACK, port: int = 0) -> tuple[TCPStore, int]:
    """A store that listens at `address` alone, and its port; 0 asks for any. `OSError` where it cannot."""
    listener = listen(address, port)
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=JOIN_LIMIT_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # by itself it would listen on every address
    )
    return store, port


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens at `address`."""
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


# ------------------------------------------------------------------------------------------------ doors and tunnels
class Relay:
    """Passes on what connects to `listener`, in a thread, until it is closed.

    onward: makes the other side of a connection. admit: whether one is let in at all; all by default.
    """

    def __init__(
        self,
        listener: socket.socket,
        onward: Callable[[], Awaitable[Streams]],
        admit: Callable[[Streams], Awaitable[bool]] | None = None,
    ) -> None:
        self._onward, self._admit = onward, admit
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listener, ready)), name="evenly relay", daemon=True
        )
        self._thread.start()
        ready.wait()

    def close(self) -> None:
        """Ends all connections."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self, listener: socket.socket, ready: threading.Event) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._pass_on, sock=listener)
        ready.set()
        await self._over.wait()
        server.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._admit is not None and not await asyncio.wait_for(self._admit((reader, writer)), GREETING_LIMIT_S):
                return
            their_reader, their_writer = await self._onward()
            await asyncio.gather(_copy(reader, their_writer), _copy(their_reader, writer))
        except (OSError, EOFError, TimeoutError):
            pass  # whoever waits at the end of this connection finds it closed
        finally:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    finally:
        writer.close()


async def _let_in(streams: Streams, secret: bytes) -> bool:
    """The door's side of a greeting: whether the other has the secret."""
    reader, writer = streams
    mine = secrets.token_bytes(NONCE)
    writer.write(mine)
    theirs = await reader.readexactly(NONCE)
    proof = await reader.readexactly(len(_proof(secret, "tunnel", mine, theirs)))
    if not hmac.compare_digest(proof, _proof(secret, "tunnel", mine, theirs)):
        return False
    writer.write(_proof(secret, "door", mine, theirs))
    return True


async def _enter(host: str, port: int, secret: bytes) -> Streams:
    """The tunnel's side: a connection to the store behind the door; `PermissionError` where secrets differ."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), GREETING_LIMIT_S)
    try:
        theirs = await asyncio.wait_for(reader.readexactly(NONCE), GREETING_LIMIT_S)
        mine = secrets.token_bytes(NONCE)
        writer.write(mine + _proof(secret, "tunnel", theirs, mine))
        expected = _proof(secret, "door", theirs, mine)
        answer = await asyncio.wait_for(reader.readexactly(len(expected)), GREETING_LIMIT_S)
    except (EOFError, ConnectionError, TimeoutError):
        answer, expected = b"", b"door"
    if not hmac.compare_digest(answer, expected):
        writer.transport.abort()
        raise PermissionError("the secrets differ")
    return reader, writer


async def _knock(host: str, port: int, secret: bytes) -> None:
    _, writer = await _enter(host, port, secret)
    writer.close()
    await writer.wait_closed()


def _proof(secret: bytes, side: str, of_door: bytes, of_tunnel: bytes) -> bytes:
    return hmac.digest(secret, side.encode() + of_door + of_tunnel, DIGEST)

"""Where the launchers of a run find each other: one store of torch's, which their ranks use too, and nobody else.

    ranks and launcher of node 0  -> the store, on loopback
    those of another node         -> its tunnel, on loopback -> the door of node 0 -> the store

A store answers whoever reaches its port: it has no password. So it listens on loopback alone. Other nodes come in by a
door, which listens on the one interface that leads to them, and lets in who proves to have the secret of the run: door
and tunnel each answer a random number of the other's with an HMAC of it, before anything reaches the store. Nothing is
encrypted. A tunnel says whose it is: a launcher is there as long as it has a connection through the door.

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
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from evenly.errors import UserError
from evenly.launcher.environment import LOOPBACK
from evenly.launcher.interfaces import local_address, words

JOIN_LIMIT_S = 300.0  # for node 0 to open its door
GREETING_LIMIT_S = 10.0  # for one that knocks to prove that it knows the secret
VANISHED_S = 15  # for which another machine may not answer before its connections count as closed
NONCE, NAME, DIGEST = 32, 16, "sha256"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class OneNode(RendezvousHandler):
    """What torch's agent is given as its rendezvous: this node alone; its ranks use the store at `port`, on loopback.

    How ranks of several nodes are numbered is decided by `launcher/rounds`: agents do not wait for each other.
    """

    port: int | None = None
    _store: TCPStore | None = field(default=None, init=False)

    def next_rendezvous(self) -> RendezvousInfo:
        if self.port is None:
            self._store, self.port = serve_store()
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, self.port))

    def shutdown(self) -> bool:
        self._store = None
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


@dataclass
class NodeStore:
    """The store of a run on several nodes as node `node` of at most `nodes` has it; node 0 opens a door at host:port.

    secret: of the run, the same on every node. token: the launcher's own name, of 16 hexadecimal digits.
    """

    nodes: int
    node: int
    host: str
    port: int
    secret: bytes
    token: str = field(default_factory=lambda: secrets.token_hex(NAME // 2))
    limit_s: float = JOIN_LIMIT_S
    local_port: int = field(default=0, init=False)
    _relay: Relay | None = field(default=None, init=False)
    _store: TCPStore | None = field(default=None, init=False)

    def open(self) -> None:
        """Opens the door, or waits for it. Raises `UserError`."""
        if self.node == 0:
            self._serve()
        else:
            self._knock()
            listener = listen(LOOPBACK)
            self.local_port = listener.getsockname()[1]
            self._relay = Relay(listener, self._enter)

    def client(self) -> TCPStore:
        return TCPStore(LOOPBACK, self.local_port, is_master=False, wait_for_workers=False)

    def there(self) -> list[str]:
        """The tokens of the launchers that are connected to the door, in the order in which they have come."""
        assert self._relay is not None
        return [token for token, connections in self._relay.inside.copy().items() if connections]

    def close(self) -> None:
        """Ends all connections."""
        if self._relay is not None:
            self._relay.close()
        self._store = None

    def _serve(self) -> None:
        listener = self._listen()
        self._store, self.local_port = serve_store()

        async def onward() -> Streams:
            return await asyncio.open_connection(LOOPBACK, self.local_port)

        self._relay = Relay(listener, onward, lambda streams: _let_in(streams, self.secret))

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

    def _knock(self) -> None:
        """Waits until node 0 opens."""
        until = time.monotonic() + self.limit_s
        while True:
            try:
                asyncio.run(self._try_to_enter())
                return
            except PermissionError:
                found = f"who listens there, node 0 or another program, has another secret than node {self.node}"
                raise UserError(self._asked, found, "give all nodes the same secret, and a port of their own") from None
            except OSError as problem:
                if time.monotonic() > until:
                    found = f"node 0 did not answer node {self.node} within {self.limit_s:.0f} s ({words(problem)})"
                    do = "start every node with the same rendezvous; node 0 must run on that host, its port open to all"
                    raise UserError(self._asked, found, do) from None
            time.sleep(0.2)

    async def _enter(self) -> Streams:
        return await _enter(self.host, self.port, self.secret, self.token.encode())

    async def _try_to_enter(self) -> None:
        _, writer = await self._enter()
        writer.close()
        await writer.wait_closed()

    @property
    def _asked(self) -> str:
        return f"meet {self.nodes} nodes at {self.host}:{self.port}"


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
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


# ------------------------------------------------------------------------------------------------ doors and tunnels
class Relay:
    """Passes on what connects to `listener`, in a thread, until it is closed.

    onward: makes the other side of a connection. admit: the name of one that is let in, None of others; by default
    all are, without a name. inside: connections that are open, by name.
    """

    def __init__(
        self,
        listener: socket.socket,
        onward: Callable[[], Awaitable[Streams]],
        admit: Callable[[Streams], Awaitable[str | None]] | None = None,
    ) -> None:
        self._onward, self._admit = onward, admit
        self.inside = Counter[str]()
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listener, ready)), name="evenly relay", daemon=True
        )
        self._thread.start()
        ready.wait()

    def close(self) -> None:
        """Ends all connections; safe to call twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()

    async def _serve(self, listener: socket.socket, ready: threading.Event) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._pass_on, sock=listener)
        ready.set()
        await self._over.wait()
        server.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name: str | None = ""
        try:
            if self._admit is not None:
                name = await asyncio.wait_for(self._admit((reader, writer)), GREETING_LIMIT_S)
            if name is None:
                return
            self.inside[name] += 1
            try:
                _end_where_vanished(writer)
                their_reader, their_writer = await self._onward()
                _end_where_vanished(their_writer)
                await asyncio.gather(_copy(reader, their_writer), _copy(their_reader, writer))
            finally:
                self.inside[name] -= 1
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # whoever waits at the end of this connection finds it closed
        finally:
            writer.close()


def _end_where_vanished(writer: asyncio.StreamWriter) -> None:
    """Has the system close the connection where the other machine is silent for too long; Linux only."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        seconds = {socket.TCP_KEEPIDLE: VANISHED_S // 3, socket.TCP_KEEPINTVL: VANISHED_S // 5}
        for option, value in {**seconds, socket.TCP_USER_TIMEOUT: VANISHED_S * 1000}.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    finally:
        writer.close()


async def _let_in(streams: Streams, secret: bytes) -> str | None:
    """The door's side of a greeting: the name of the other, None where it does not have the secret."""
    reader, writer = streams
    mine = secrets.token_bytes(NONCE)
    writer.write(mine)
    theirs = await reader.readexactly(NONCE + NAME)
    proof = await reader.readexactly(len(_proof(secret, "tunnel", mine, theirs)))
    if not hmac.compare_digest(proof, _proof(secret, "tunnel", mine, theirs)):
        return None
    writer.write(_proof(secret, "door", mine, theirs))
    return theirs[NONCE:].decode(errors="replace")


async def _enter(host: str, port: int, secret: bytes, name: bytes) -> Streams:
    """The tunnel's side: a connection to the store behind the door; `PermissionError` where secrets differ."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), GREETING_LIMIT_S)
    try:
        theirs = await asyncio.wait_for(reader.readexactly(NONCE), GREETING_LIMIT_S)
        mine = secrets.token_bytes(NONCE) + name
        writer.write(mine + _proof(secret, "tunnel", theirs, mine))
        expected = _proof(secret, "door", theirs, mine)
        answer = await asyncio.wait_for(reader.readexactly(len(expected)), GREETING_LIMIT_S)
    except (EOFError, ConnectionError, TimeoutError):
        answer, expected = b"", b"door"
    if not hmac.compare_digest(answer, expected):
        writer.transport.abort()
        raise PermissionError("the secrets differ")
    return reader, writer


def _proof(secret: bytes, side: str, of_door: bytes, of_tunnel: bytes) -> bytes:
    return hmac.digest(secret, side.encode() + of_door + of_tunnel, DIGEST)

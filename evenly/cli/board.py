"""`evenly board`: serves the runs of a folder as live pages, on loopback, or elsewhere to those who know a token."""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Mapping
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from evenly.errors import UserError
from evenly.report.board import Board, Reply, list_page
from evenly.report.page import script_of

COOKIE = "evenly_board"
HTML, JSON = "text/html; charset=utf-8", "application/json"


def board(folder: Path, *, host: str, port: int) -> int:
    """Serves until it is interrupted; returns the exit code."""
    server = open_board(folder, host=host, port=port)
    print(f"the runs in {folder} are at {server.address}", file=sys.stderr)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0


def open_board(folder: Path, *, host: str = "127.0.0.1", port: int = 0) -> BoardServer:
    """A server that listens, and does not serve yet. Raises `UserError` where it cannot."""
    if not folder.is_dir():
        raise UserError(
            f"evenly board {folder}", "there is no such folder", "name the folder of runs: evenly board runs"
        )
    try:
        return BoardServer(folder, host, port)
    except (OSError, UnicodeError) as problem:
        found = getattr(problem, "strerror", None) or str(problem)
        raise UserError(f"listen on {host}:{port}", found, "name another --host or --port; 0 takes any port") from None


class BoardServer(ThreadingHTTPServer):
    """The runs in `folder`; token: that is asked for, '' on loopback."""

    daemon_threads = True

    def __init__(self, folder: Path, host: str, port: int) -> None:
        self.board, self.lock = Board(folder), Lock()
        self.token = "" if is_loopback(host) else secrets.token_urlsafe(24)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), BoardRequest)

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        named = f"[{host}]" if ":" in str(host) else str(host)
        return f"http://{named}:{port}/{f'?token={self.token}' if self.token else ''}"

    def server_bind(self) -> None:
        """Without a look at the machine's name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def is_loopback(host: str) -> bool:
    """Whether only this machine can call there."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class BoardRequest(BaseHTTPRequestHandler):
    """One request: a page, the list, or what has changed of a page. Names are looked up, never made into paths."""

    protocol_version = "HTTP/1.1"
    timeout = 30

    @property
    def _board_server(self) -> BoardServer:
        assert isinstance(self.server, BoardServer)
        return self.server

    def do_GET(self) -> None:
        try:
            address = urlsplit(self.path)
            asked = parse_qs(address.query)
        except ValueError:
            return self._refuse(HTTPStatus.BAD_REQUEST, "that is no address")
        if not self._is_local_name():
            self._refuse(HTTPStatus.FORBIDDEN, "this board is for browsers on its own machine")
        elif not self._knows_token(asked):
            self._refuse(HTTPStatus.FORBIDDEN, "the address lacks the token that evenly board has printed")
        elif "token" in asked:
            self._remember(address.path)
        else:
            self._find([unquote(part) for part in address.path.split("/")[1:]], asked)
        return None

    do_HEAD = do_GET

    def _find(self, parts: list[str], asked: Mapping[str, list[str]]) -> None:
        board = self._board_server.board
        try:
            with self._board_server.lock:
                match parts:
                    case [""]:
                        reply, kind = Reply.of(list_page(board.root, script_of("board.js"))), HTML
                    case ["runs.json"]:
                        reply, kind = board.listing(), JSON
                    case ["run", name]:
                        reply, kind = board.page(name, script=script_of("live.js")), HTML
                    case ["run", name, "contents"]:
                        reply, kind = board.page(name), HTML
                    case ["compare"]:
                        reply, kind = board.comparison(asked.get("run", [])), HTML
                    case _:
                        raise KeyError(self.path)
        except KeyError:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such run, and no such page")
        except UserError as problem:
            self._refuse(HTTPStatus.NOT_FOUND, str(problem))
        else:
            self._send(reply, kind)

    # --- who may ask
    def _is_local_name(self) -> bool:
        """On loopback, a page of another site may have its own name point here: it is not asked by that."""
        if self._board_server.token:
            return True
        try:
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            return False
        return name is not None and is_loopback(name)

    def _knows_token(self, asked: Mapping[str, list[str]]) -> bool:
        if not self._board_server.token:
            return True
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        given = [*asked.get("token", []), *([cookie.value] if cookie else [])]
        return any(secrets.compare_digest(one.encode(), self._board_server.token.encode()) for one in given)

    def _remember(self, path: str) -> None:
        """Takes the token out of the address, which others may see, into a cookie."""
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", quote(f"/{path.lstrip('/')}", safe="/%"))
        self.send_header("Set-Cookie", f"{COOKIE}={self._board_server.token}; HttpOnly; SameSite=Strict; Path=/")
        self._end_head(0)

    # --- answers
    def _send(self, reply: Reply, kind: str) -> None:
        tag = f'"{reply.tag}"'
        if self.headers.get("If-None-Match") == tag:
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self.send_header("ETag", tag)
            self.end_headers()
            return
        body = reply.text.encode("utf-8", errors="replace")
        self.send_response(HTTPStatus.OK)
        self.send_header("ETag", tag)
        self.send_header("Content-Type", kind)
        self._end_head(len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: HTTPStatus, words: str) -> None:
        body = f"{words}\n".encode("utf-8", errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self._end_head(len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _end_head(self, length: int) -> None:
        for name, value in (
            ("Content-Length", str(length)),
            ("Cache-Control", "no-cache"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Referrer-Policy", "no-referrer"),
        ):
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a page asks every few seconds."""

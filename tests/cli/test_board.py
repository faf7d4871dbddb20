"""`evenly board`: the runs of a folder over HTTP, read once, to nobody else, and nothing beyond the folder."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from made_runs import event, plan, record, write_full_run, write_run

from evenly.cli.board import BoardServer, is_loopback, open_board
from evenly.errors import UserError
from evenly.report.board import Board


@contextmanager
def served(folder: Path, host: str = "127.0.0.1") -> Iterator[BoardServer]:
    server = open_board(folder, host=host)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(timeout=30)
        server.server_close()


def get(server: BoardServer, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    write_full_run(folder / "first <b>")
    going = [record(step) for step in range(1, 11)]
    write_run(folder / "second", going, events=[event("started", 0, 0)], of_plan=plan(plan="data=2 zero=3"))
    (folder / "no run").mkdir()
    secret = write_run(tmp_path / "secret", [record(1)])
    (folder / "link").symlink_to(secret)
    return folder


def test_the_list_has_the_runs_of_the_folder(runs: Path) -> None:
    with served(runs) as server:
        status, _, text = get(server, "/runs.json")
        found = {row["name"]: row for row in json.loads(text)["runs"]}
        assert status == 200 and {*found} == {"first <b>", "second"}
        second = found["second"]
        assert (second["state"], second["step"], second["steps"]) == ("running", 10, 40)
        assert (second["plan"], second["loss"], second["per_s"], second["unit"]) == (
            "data=2 zero=3",
            2.0,
            320.0,
            "tokens/s",
        )
        assert second["left_s"] == pytest.approx(6.0) and found["first <b>"]["state"] == "ended"
        assert get(server, "/")[0] == 200


def test_a_list_and_a_page_change_only_with_the_run(runs: Path) -> None:
    with served(runs) as server:
        server.board._not_before_s = 0.0
        tags = {path: get(server, path)[1]["ETag"] for path in ("/runs.json", "/run/second/contents")}
        for path, tag in tags.items():
            status, _, text = get(server, path, If_None_Match=tag)
            assert (status, text) == (304, "")
        with (runs / "second" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record(11, loss=0.125)) + "\n")
        server.board._not_before_s = 0.0  # however long the first page took
        for path, tag in tags.items():
            status, _, text = get(server, path, If_None_Match=tag)
            assert status == 200 and "0.125" in text


def test_a_page_is_not_made_again_at_once(runs: Path) -> None:
    board = Board(runs)
    first = board.page("second")
    with (runs / "second" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(11)) + "\n")
    board._not_before_s = float("inf")
    assert board.page("second") is first


def test_what_is_read_is_read_once(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evenly.report import growing

    read: list[str] = []
    lines = growing.GrowingFile.lines

    def counting(file: growing.GrowingFile) -> list[str]:
        found = lines(file)
        read.extend(found if file.path.name == "metrics.jsonl" else [])
        return found

    monkeypatch.setattr(growing.GrowingFile, "lines", counting)
    board = Board(runs)
    for _ in range(3):
        board.listing()
    assert len(read) == 45 + 10
    with (runs / "second" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(11)) + "\n")
    for _ in range(3):
        board.listing()
    assert len(read) == 45 + 11


def test_a_row_is_made_again_where_its_run_has_changed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evenly.report import board as module

    made: list[str] = []
    row_of = module.row_of

    def counting(name: str, *rest: Any) -> dict[str, Any]:
        made.append(name)
        return row_of(name, *rest)

    monkeypatch.setattr(module, "row_of", counting)
    board = Board(runs)
    for _ in range(3):
        board.listing()
    assert sorted(made) == ["first <b>", "second"]
    with (runs / "second" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(11)) + "\n")
    board.listing()
    assert made[2:] == ["second"]
    later = module.time.time() + 3600
    monkeypatch.setattr(module.time, "time", lambda: later)  # nothing was written for an hour
    states = {row["name"]: row["state"] for row in json.loads(board.listing().text)["runs"]}
    assert states == {"first <b>": "ended", "second": "silent"} and made[3:] == ["second"]


def test_a_run_that_was_listed_is_looked_for_again(runs: Path) -> None:
    board = Board(runs)
    board.listing()
    board.page("second")
    (runs / "second").rename(runs / "third")
    with pytest.raises(KeyError):
        board.page("second")
    (runs / "second").symlink_to(runs.parent / "secret")
    with pytest.raises(KeyError):
        board.page("second")
    assert {row["name"] for row in json.loads(board.listing().text)["runs"]} == {"first <b>", "third"}


def test_a_page_shows_its_run_and_follows_it(runs: Path) -> None:
    with served(runs) as server:
        status, headers, text = get(server, "/run/first%20%3Cb%3E")
        assert status == 200 and "The timeline of a step" in text and "connect-src 'self'" in text
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-cache"
        status, _, inner = get(server, "/run/first%20%3Cb%3E/contents")
        assert status == 200 and inner.startswith("<h1>") and "<script" not in inner
        status, _, text = get(server, "/compare?run=second&run=first%20%3Cb%3E&run=second")
        assert status == 200 and "2 runs" in text and "<b>" not in text


@pytest.mark.parametrize(
    "path",
    [
        "/run/..%2Fsecret", "/run/../secret", "/run/link", "/run/link/contents", "/run/no%20run", "/run/",
        "/etc/passwd", "/%2e%2e/secret", "/run/second/metrics.jsonl", "/run/second%00", "/compare",
        "/compare?run=link", "/run/%ff",
    ],
)  # fmt: skip
def test_nothing_else_is_served(path: str, runs: Path) -> None:
    with served(runs) as server:
        status, _, text = get(server, path)
        assert status == 404 and len(text) < 200


def test_a_folder_of_no_run_any_more_is_left_out(runs: Path) -> None:
    (runs / "second" / "metrics.jsonl").write_text("{'no json'}\n")
    with served(runs) as server:
        assert [row["name"] for row in json.loads(get(server, "/runs.json")[2])["runs"]] == ["first <b>"]
        status, _, text = get(server, "/run/second")
        assert status == 404 and "not a run's" in text


def test_another_site_s_name_that_points_here_is_refused(runs: Path) -> None:
    with served(runs) as server:
        assert get(server, "/runs.json", Host="attacker.example:80")[0] == 403
        assert get(server, "/runs.json", Host="[::1")[0] == 403
        assert get(server, "/runs.json", Host=f"localhost:{server.server_port}")[0] == 200


def test_beyond_loopback_a_token_is_asked_for(runs: Path) -> None:
    with served(runs, "0.0.0.0") as server:
        assert server.token and server.token in server.address
        for path, headers in (
            ("/", {}),
            ("/runs.json?token=wrong", {}),
            ("/run/second?token=", {}),
            ("/runs.json", {"Cookie": "evenly_board=wrong"}),
        ):
            assert get(server, path, **headers)[0] == 403
        status, headers, _ = get(server, f"/run/second?token={server.token}")
        assert status == 303 and headers["Location"] == "/run/second"
        assert "HttpOnly" in headers["Set-Cookie"] and "SameSite=Strict" in headers["Set-Cookie"]
        cookie = headers["Set-Cookie"].split(";")[0]
        assert get(server, "/run/second", Cookie=cookie)[0] == 200
        assert get(server, f"//evil.example/?token={server.token}")[1]["Location"].startswith("/evil")
    with served(runs) as server:
        assert not server.token


def test_which_addresses_are_this_machine_s_alone() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.3.2.1", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "node-1", "localhost.example", "")))


def test_a_board_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        open_board(tmp_path / "none")
    with pytest.raises(UserError, match="--host or --port"):
        open_board(tmp_path, host="999.1.1.1")
    with served(tmp_path) as server, pytest.raises(UserError, match="listen on"):
        open_board(tmp_path, port=server.server_port)


def test_only_so_many_runs_are_followed(runs: Path) -> None:
    for at in range(12):
        write_run(runs / f"run {at}", [record(1)])
    board: Any = Board(runs)
    for at in range(12):
        board.page(f"run {at}")
    assert [*board._followed] == [f"run {at}" for at in range(4, 12)]
    (runs / "run 11" / "plan.json").unlink()
    with pytest.raises(KeyError):
        board.page("run 11")

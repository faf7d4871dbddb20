"""Looks at every page in a browser: runs of all examples and all axes of plans, plans, clusters, mechanisms, the board.

    python docs/pictures/pages.py FOLDER               everything: some minutes on two cores
    python docs/pictures/pages.py FOLDER digits plan   what has these words in its name
    python docs/pictures/pages.py FOLDER pictures      draws the pictures that the documentation shows of pages

Makes the runs and the pages in FOLDER, opens each page in chromium at 1300 and 400 pixels, light and dark, and leaves
`FOLDER/shots/NAME-light.png` with both widths next to each other, from head to foot, and `-dark.png`. A line for each
page says its size and what the browser complained of; the exit code is 1 where a page could not be made, has an error
on its console, is wider than its window or larger than a megabyte. Runs and plans in FOLDER are not made again; the
pages of runs are.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from signal import SIGINT
from threading import Event, Thread
from typing import Any, TypeVar

Result = TypeVar("Result")
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
EVENLY = [sys.executable, "-m", "evenly"]
STEPS = 8
WIDE, NARROW, HIGH = 1300, 400, 2600
BOTH, HIGHEST = WIDE + NARROW + 40, 12_000  # of a window with room for both widths
MOST_BYTES = 1_000_000
FINISHED, OF_FINISHED, GROWING = 200, 1000, 3  # runs that have ended, their steps, and runs that go on
LIST_EVERY_S, PAGE_EVERY_S, FOLLOWED_S = 2, 3, 60  # as board.js and live.js ask
BOARD_SHOTS = [
    *(("board", "light", ""), ("board", "dark", ""), ("board-run", "light", "run/growing-0")),
    *(("board-run", "dark", "run/growing-0"), ("board-compared", "light", "compare?run=growing-0&run=finished-000")),
]

# Every example, on two devices under a plan that suits it.
OF_EXAMPLES: dict[str, list[str]] = {
    f"example-{name}": [f"examples/{name}.py", "--plan", plan, "--devices", "2"]
    for name, plan in {
        "bert": "ddp",
        "digits": "ddp",
        "digits_own_loop": "ddp",
        "gpt2": "zero3",
        "llama": "tensor=2",
        "recurrent": "ddp",
        "resnet": "zero1",
        "stdlib_lm": "ddp",
        "t5": "pipeline=2",
        "vit": "zero2",
    }.items()
}
# Every axis, and every schedule of a pipeline.
PLANS = {
    "single": ("single", 1),
    "dp": ("dp replicas=2", 2),
    "ddp": ("ddp", 2),
    "zero1": ("zero1", 2),
    "zero2": ("zero2", 2),
    "zero3": ("zero3", 2),
    "hsdp": ("hsdp", 4),
    "tensor": ("tensor=2", 2),
    "2d": ("2d", 4),
    "tensor-pipeline": ("tensor=2 pipeline=2", 4),
    "3d": ("3d", 8),
    "recompute": ("ddp recompute=full", 2),
    "bitwise": ("ddp exact=bitwise", 2),
    **{
        f"pipeline-{schedule}": (f"pipeline=2 schedule={schedule}", 2)
        for schedule in ("naive", "gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev")
    },
}
OF_PLANS = {
    f"plan-{name}": ["examples/gpt2.py", "--plan", plan, "--devices", str(devices), "--set", "layers=4"]
    for name, (plan, devices) in PLANS.items()
}
RUNS = OF_EXAMPLES | OF_PLANS
WIDER = ["--set", "width=512", "--set", "layers=8"]
PAGES: dict[str, list[str]] = {
    "planned-llama": ["plan", "llama-3.1-8b", "--cluster", "8xH100", "--top", "3"],
    "planned-job": ["plan", "examples/gpt2.py", "--cluster", "4xA100-80"],
    "planned-nothing-fits": ["plan", "llama-3.1-70b", "--cluster", "4xH100"],
    "clusters": [
        *("plan", "llama-3.1-8b", "--tokens", "1e12"),
        *("--cluster", "8xH100", "--price", "2.9", "--cluster", "2x8xA100-80", "--price", "1.5"),
        *("--cluster", "8xB200", "--price", "5.2", "--cluster", "8xL40S", "--price", "0.9"),
    ],
    "mechanisms-data": ["plan", "examples/gpt2.py", "--explain", "--only", "data=4 zero=2", *WIDER],
    "mechanisms-ragged": ["plan", "examples/stdlib_lm.py", "--explain", "--only", "data=3 zero=3"],
    "mechanisms-3d": ["plan", "examples/gpt2.py", "--explain", "--only", "data=2 tensor=2 pipeline=2"],
}

# Of the documentation's pictures, the runs that they are of.
PICTURED = {
    "ddp": ["examples/digits.py", "--plan", "ddp", "--devices", "2"],
    "zero3": ["examples/digits.py", "--plan", "zero3", "--devices", "2"],
    "pipeline": ["examples/digits.py", "--plan", "pipeline=2", "--devices", "2"],
    "slower": ["examples/digits.py", "--plan", "ddp", "--devices", "2", "--set", "lr=0.01"],
}


@dataclass(frozen=True)
class Screen:
    """A picture of the beginning of a page in FOLDER, in pixels; `columns`: screens of a phone next to each other."""

    page: str
    high: int
    scheme: str = "light"
    wide: int = 1300
    columns: int = 1


SCREENS = {
    "report": Screen("pictured/ddp/report.html", 1500),
    "report-phone": Screen("pictured/ddp/report.html", 900, "dark", 400, columns=3),
    "comparison": Screen("pictured/comparison.html", 1160),
    "plans": Screen("planned-llama.html", 1080),
    "clusters": Screen("clusters.html", 900, "dark"),
    "mechanisms": Screen("mechanisms-data.html", 1630),
}
BOARD_HIGH = 500

# What is wrong with a page is written to its console, as errors of scripts are.
CHECK = """<script>addEventListener("load", () => setTimeout(() => {
  for (const one of document.querySelectorAll("main *"))
    if (one.getBoundingClientRect().right > document.documentElement.clientWidth + 1
        && !one.closest(".scroll, svg, pre, .ticks, .texts, details:not([open])")) {
      console.error(`wider than the page: ${one.tagName}.${one.className}`);
      break;
    }
}, 200))</script>"""


# Frames as high as the pages in them, and that height as the title.
WHOLE = """<script>addEventListener("load", () => setTimeout(() => {
  const heights = [...document.querySelectorAll("iframe")].map((one) => {
    const high = one.contentDocument.querySelector("main").getBoundingClientRect().height + 20;
    one.style.height = `${high}px`;
    return Math.ceil(high);
  });
  document.title = Math.max(...heights);
}, 400))</script>"""


def main() -> int:
    """Makes what is missing, looks at all of it; returns the exit code."""
    folder, words = Path(sys.argv[1]).resolve(), sys.argv[2:]
    (folder / "shots").mkdir(parents=True, exist_ok=True)
    bad = 0
    for name, page in chain(_reports(folder, words), _planned(folder, words)):
        bad += _looked_at(name, page, folder)
    if not words or "board" in words:
        bad += _board(folder)
    if "pictures" in words:
        _pictures(folder)
    return 1 if bad else 0


def _wanted(name: str, words: list[str]) -> bool:
    return not words or any(word in name for word in words)


def _reports(folder: Path, words: list[str]) -> Iterator[tuple[str, Path]]:
    for name, arguments in RUNS.items():
        run = folder / "runs" / name
        if not _wanted(name, words):
            continue
        if not (run / "report.html").exists():
            shutil.rmtree(run, ignore_errors=True)
            _call([*EVENLY, "run", *arguments, "--steps", str(STEPS), "--out", str(run)], name)
        _call([*EVENLY, "report", str(run)], name)
        yield name, run / "report.html"
    compared = [folder / "runs" / name for name in ("plan-ddp", "plan-zero3", "plan-pipeline-1f1b")]
    if _wanted("comparison", words) and all(run.exists() for run in compared):
        page = folder / "comparison.html"
        _call([*EVENLY, "report", *map(str, compared), "--html", str(page)], "comparison")
        yield "comparison", page


def _planned(folder: Path, words: list[str]) -> Iterator[tuple[str, Path]]:
    for name, arguments in PAGES.items():
        page = folder / f"{name}.html"
        if _wanted(name, words):
            if not page.exists():
                _call([*EVENLY, *arguments, "--html", str(page)], name)
            yield name, page


def _call(command: list[str], name: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        print(f"{name}: exit code {done.returncode}: {done.stderr.strip()[-600:]}", flush=True)


# --- the browser ---------------------------------------------------------------------------------------


def _looked_at(name: str, page: Path, folder: Path) -> bool:
    """Takes both screenshots; whether anything is wrong with the page."""
    if not page.exists():
        return True
    size = page.stat().st_size
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "page.html"
        copy.write_text(page.read_text(encoding="utf-8") + CHECK, encoding="utf-8")
        found = screenshots("page.html", Path(temporary), folder / "shots" / name)
    print(f"{name}: {size:,} bytes{''.join(f'; {line}' for line in dict.fromkeys(found))}", flush=True)
    return bool(found) or size > MOST_BYTES


def screenshots(page: str, folder: Path, picture: Path) -> list[str]:
    """Pictures `PICTURE-light.png` and `-dark.png` of a page in `folder`, in windows of both widths, whole.

    Returns what its console has. `folder` takes files of the browser.
    """
    frames = "".join(
        f"<iframe src='{page}' style='width:{width}px;height:{HIGH}px;border:0;margin-right:20px;vertical-align:top'>"
        "</iframe>"
        for width in (WIDE, NARROW)
    )
    frame = folder / "frame.html"
    frame.write_text(
        "<!doctype html><meta name=color-scheme content='light dark'>"
        f"<body style='margin:0;white-space:nowrap;background:#888'>{frames}{WHOLE}"
    )
    text, found = _chromium(frame.as_uri(), folder, "light", "--dump-dom")
    high = min(HIGHEST, int(text.partition("<title>")[2].partition("<")[0] or HIGH))
    for scheme in ("light", "dark"):
        found += _chromium(frame.as_uri(), folder, scheme, f"--screenshot={picture}-{scheme}.png", size=(BOTH, high))[1]
    return found


def _chromium(
    address: str, folder: Path, scheme: str, *options: str, size: tuple[int, int] = (BOTH, HIGH)
) -> tuple[str, list[str]]:
    """What it prints, and the lines of the console; size: of the window."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or "google-chrome"
    command = [
        *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"),
        *("--hide-scrollbars", "--allow-file-access-from-files", "--virtual-time-budget=4000"),
        f"--window-size={size[0]},{size[1]}",
        f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
        *(*options, address),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "", ["chromium did not end within two minutes"]
    lines = [line.split("CONSOLE", 1)[1][:300] for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, lines + ([f"chromium ended with {done.returncode}"] if done.returncode else [])


# --- the documentation's pictures ----------------------------------------------------------------------


def _pictures(folder: Path) -> None:
    """Draws `SCREENS` next to this file, and the board as `_board` has left it in FOLDER."""
    runs = {name: folder / "pictured" / name for name in PICTURED}
    for name, arguments in PICTURED.items():
        if not (runs[name] / "report.html").exists():
            _call([*EVENLY, "run", *arguments, "--out", str(runs[name])], name)
        _call([*EVENLY, "report", str(runs[name])], name)
    page = folder / "pictured" / "comparison.html"
    _call([*EVENLY, "report", *map(str, runs.values()), "--html", str(page)], "comparison")
    for name, one in SCREENS.items():
        _drawn(one, folder, Path(__file__).with_name(f"{name}.png"))
    board, source = folder / "board" / "runs", next((folder / "runs").glob("*/metrics.jsonl"))
    with _growing(board, source), _served(board) as (address, _), tempfile.TemporaryDirectory() as temporary:
        time.sleep(5)
        shot = f"--screenshot={Path(__file__).with_name('board.png')}"
        _chromium(address, Path(temporary), "light", shot, size=(WIDE, BOARD_HIGH))


def _drawn(one: Screen, folder: Path, picture: Path) -> None:
    frames = "".join(
        f"<div style='display:inline-block;vertical-align:top;width:{one.wide}px;height:{one.high}px;overflow:hidden;"
        "margin-right:16px'>"
        f"<iframe src='page.html' style='width:{one.wide}px;height:{one.high * one.columns + 400}px;"
        f"border:0;margin-top:-{one.high * at}px'></iframe></div>"
        for at in range(one.columns)
    )
    with tempfile.TemporaryDirectory() as temporary:
        shutil.copy(folder / one.page, Path(temporary) / "page.html")
        frame = Path(temporary) / "frame.html"
        frame.write_text(
            "<!doctype html><meta name=color-scheme content='light dark'>"
            f"<body style='margin:0;white-space:nowrap;background:#888'>{frames}"
        )
        shot, wide = f"--screenshot={picture}", one.columns * (one.wide + 16) - 16
        _chromium(frame.as_uri(), Path(temporary), one.scheme, shot, size=(wide, one.high))
    print(f"{picture.name}: {picture.stat().st_size:,} bytes", flush=True)


# --- the board -----------------------------------------------------------------------------------------


def _board(folder: Path) -> bool:
    """A board of runs that grow, and of many that have ended: what it shows follows, it loads at once, and is cheap."""
    source = next((folder / "runs").glob("*/metrics.jsonl"), None)
    if source is None:
        print("board: no run to copy", flush=True)
        return True
    board = folder / "board" / "runs"
    shutil.rmtree(board, ignore_errors=True)
    for number in range(FINISHED):
        _copied(source.parent, board / f"finished-{number:03}", OF_FINISHED)
    for number in range(GROWING):
        _copied(source.parent, board / f"growing-{number}", 1)
    with _growing(board, source), _served(board) as (address, process), tempfile.TemporaryDirectory() as temporary:
        first, again = (_measured(process, lambda: _steps(address)) for _ in range(2))
        before = _steps(address)
        found = list[str]()
        for name, scheme, page in BOARD_SHOTS:  # in the wide window alone: no other page may frame one of the board
            shot = f"--screenshot={folder / 'shots' / f'{name}-{scheme}.png'}"
            found += _chromium(address + page, Path(temporary), scheme, shot)[1]
        whole_s, (text, _) = _timed(lambda: _chromium(address, Path(temporary), "light", "--dump-dom"))
        share = _followed(address, process)
        after = _steps(address)
    grew = all(after[name] > before[name] for name in before if name.startswith("growing"))
    listed = text.count("run/finished-")
    print(
        f"board: {FINISHED} finished runs of {OF_FINISHED:,} steps and {GROWING} that grow in {first[0]:.2f} s "
        f"({first[1]:.2f} s of processor time), again in {again[0]:.3f} s ({again[1]:.3f} s); a browser starts, shows "
        f"{listed} of them and ends in {whole_s:.1f} s; followed for {FOLLOWED_S} s by a list and {GROWING} pages: "
        f"{share:.2%} of a core{'' if grew else ', but NOT all grew'}{''.join(f'; {line}' for line in found)}",
        flush=True,
    )
    return bool(found) or not grew or listed != FINISHED or first[0] > 2 or share > 0.01


def _copied(run: Path, to: Path, steps: int) -> None:
    """A copy of what the board reads of a run, as if it had done so many steps; the last one as the run's."""
    shutil.copytree(run / "events", to / "events")
    plan = json.loads((run / "plan.json").read_text())
    (to / "plan.json").write_text(json.dumps(plan | {"steps": max(steps, OF_FINISHED)}))
    for events in to.glob("events/*.jsonl"):
        done = [json.loads(line) for line in events.read_text().splitlines()]
        events.write_text("".join(json.dumps(one | {"step": steps if one["step"] else 0}) + "\n" for one in done))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    done = [one for one in records if "step_s" in one]
    lines = [done[number * len(done) // steps] | {"step": number + 1} for number in range(steps)]
    lines += [one | {"step": steps} for one in records if "eval_loss" in one][-1:]
    (to / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


@contextmanager
def _growing(board: Path, source: Path) -> Generator[None]:
    """Runs that do a step every quarter of a second."""
    ended = Event()
    record = [one for one in map(json.loads, source.read_text().splitlines()) if "step_s" in one][-1]
    for run in board.glob("growing-*"):  # which have not ended
        for file in run.glob("events/*.jsonl"):
            file.write_text("".join(line + "\n" for line in file.read_text().splitlines() if '"ended"' not in line))

    def grow() -> None:
        step = 1
        while not ended.wait(0.25):
            step += 1
            for run in board.glob("growing-*"):
                with (run / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(record | {"step": step, "loss": 3.0 / step + 1}) + "\n")

    thread = Thread(target=grow)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _served(board: Path) -> Generator[tuple[str, int]]:
    """The address of a board of its own process, and that process."""
    command, environment = [*EVENLY, "board", board.name, "--port", "0"], os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=board.parent, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield process.stderr.readline().split()[-1], process.pid
        finally:
            process.send_signal(SIGINT)


def _followed(address: str, process: int) -> float:
    """The share of a core that the board takes for a reader of its list and of the pages of all runs that grow."""
    ended = Event()
    pages = [f"run/growing-{number}/contents" for number in range(GROWING)]
    readers = [
        Thread(target=_ask, args=(f"{address}{page}", every_s, ended))
        for page, every_s in [("runs.json", LIST_EVERY_S), *((page, PAGE_EVERY_S) for page in pages)]
    ]

    def wait() -> None:
        for reader in readers:
            reader.start()
        ended.wait(FOLLOWED_S)
        ended.set()

    seconds, of_processor = _measured(process, wait)
    for reader in readers:
        reader.join()
    return of_processor / seconds


def _ask(address: str, every_s: float, ended: Event) -> None:
    """As a page's script does: again and again, with the tag of what it has."""
    tag = ""
    while not ended.wait(every_s):
        try:
            with urllib.request.urlopen(urllib.request.Request(address, headers={"If-None-Match": tag})) as answer:
                answer.read()
                tag = answer.headers["ETag"]
        except urllib.error.HTTPError as problem:  # 304: nothing is new
            problem.close()


def _measured(process: int, work: Callable[[], object]) -> tuple[float, float]:
    """Seconds that it takes, and those of the processor that `process` takes meanwhile."""
    before = _processor_s(process)
    seconds, _ = _timed(work)
    return seconds, _processor_s(process) - before


def _processor_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _timed(work: Callable[[], Result]) -> tuple[float, Result]:
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


def _steps(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}runs.json", timeout=60) as answer:
        return {row["name"]: row["step"] for row in json.load(answer)["runs"]}


if __name__ == "__main__":
    sys.exit(main())

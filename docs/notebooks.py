"""Pages as notebooks, and the command that runs the whole tutorial.

    python -m docs.notebooks                               all chapters, as pages and as notebooks; `make tutorial`
    python -m docs.notebooks docs/tutorial/01-memory.md    these

A page is the only source. Its text becomes cells of text, a block that is a file a cell `%%writefile NAME.py`, a
command a cell `!COMMAND`, a picture that the page draws a cell that shows the file. Both forms are run, each in its own
folder under `.work/tutorial/NAME/`, where the executed notebook stays, and have to print what the page shows.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from docs.page_text import COMMENT, LINK, ROOT, Block, blocks, file_of, links, prose
from docs.run_pages import (
    COLUMNS,
    DRAWN,
    LIMIT_S,
    Command,
    Drawn,
    Ran,
    commands_of,
    drawn_in,
    prepare,
    printed_lines,
    run_page,
)

TUTORIAL = ROOT / "docs" / "tutorial"
FOLDER = ROOT / ".work" / "tutorial"
DETAILS = re.compile(r"(<details.*?</details>)", re.DOTALL)
TAG = re.compile(r"</?details[^>]*>\n?|<summary>(.*?)</summary>")
# The first cell: a kernel sets TERM and FORCE_COLOR for its commands, which then draw progress and colours.
SETUP = f"""import os

os.environ.pop("FORCE_COLOR", None)
os.environ.update(TERM="dumb", NO_COLOR="1", COLUMNS="{COLUMNS}", OMP_NUM_THREADS="1")  # as on the page"""
EXIT_CODE = "print(_exit_code)"  # of the last command, as IPython has it


def chapters(folder: Path = TUTORIAL) -> list[Path]:
    """The pages of the tutorial in their order, without its list."""
    return [page for page in sorted(folder.glob("*.md")) if page.name != "index.md"]


# ------------------------------------------------------------------------------------------ from a page to a notebook
def notebook_of(page: Path) -> dict[str, Any]:
    """The notebook, as its file has it (nbformat 4.5); the page's own output stands below its commands."""
    cells = [{"id": f"cell-{number}", "metadata": {}, **cell} for number, (cell, _) in enumerate(cells_of(page))]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def as_file(notebook: dict[str, Any]) -> str:
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def cells_of(page: Path) -> Iterator[tuple[dict[str, Any], Command | None]]:
    """The cells, and of those that run a command of the page which one."""
    yield _code(SETUP), None
    text = page.read_text(encoding="utf-8")
    lines, done = text.splitlines(), 0
    code: dict[int, tuple[int, Block]] = {  # line of the opening fence -> of the closing one, the block
        block.line - 1: (block.line + len(block.lines), block) for block in blocks(text) if _is_code(block)
    }
    shown = {link.line: (link.line, link) for link in links(text) if link.is_picture and DRAWN.search(link.target)}
    for first, (last, part) in sorted([*code.items(), *shown.items()]):
        yield from _of_text(page, lines[done : first - 1])
        done = last
        if not isinstance(part, Block):
            yield _code(f'from IPython.display import SVG\n\nSVG("{Path(part.target).name}")  # {part.text}'), None
        elif (name := file_of(part)) is not None:
            yield _code("\n".join([f"%%writefile {name}", *part.lines])), None
        else:
            for command in commands_of(part):
                yield _code(f"!{COMMENT.sub('', command.text)}", command.shown), command
    yield from _of_text(page, lines[done:])


def _is_code(block: Block) -> bool:
    return file_of(block) is not None or ("not run" not in block.mark and any(True for _ in commands_of(block)))


def _code(source: str, shown: Sequence[str] | None = None) -> dict[str, Any]:
    outputs = [{"output_type": "stream", "name": "stdout", "text": "\n".join(shown) + "\n"}] if shown else []
    return {"cell_type": "code", "execution_count": None, "outputs": outputs, "source": source}


def _of_text(page: Path, lines: Sequence[str]) -> Iterator[tuple[dict[str, Any], None]]:
    """A cell of the text, none where there is none. A `<details>` that holds cells of code is open."""
    text = "\n".join(line for line in lines if not line.startswith("<!--"))
    text = "".join(
        part if part.startswith("<details") and part.endswith("</details>") else TAG.sub(_as_text, part)
        for part in DETAILS.split(text)
    )
    named = [*prose(text)]
    kept = text.splitlines()
    for number, line in named:
        kept[number - 1] = LINK.sub(lambda link: _linked(page, link), line)
    if source := "\n".join(kept).strip():
        yield {"cell_type": "markdown", "source": source}, None


def _as_text(tag: re.Match[str]) -> str:
    return f"**{tag[1]}**" if tag[1] else ""


def _linked(page: Path, link: re.Match[str]) -> str:
    """A link as it is in a folder of notebooks: to another chapter's notebook; text, where it leads to another page."""
    sign, text, target = link.groups()
    path = target.partition("#")[0]
    if "://" in target or not path:
        return link[0]
    if path in {chapter.name for chapter in chapters(page.parent)}:
        return f"{sign}[{text}]({path.removesuffix('.md')}.ipynb)"
    return text


# ------------------------------------------------------------------------------------------------ running a notebook
def run_notebook(page: Path, folder: Path, saved: Path) -> list[Ran | Drawn]:
    """Executes the notebook of `page` in the empty `folder`; the results of its commands, as those of a page.

    saved: the file that gets the notebook with what it has printed, also where a cell fails.
    """
    import nbformat
    from nbclient import NotebookClient

    commands = [command for _, command in cells_of(page)]
    notebook: Any = nbformat.from_dict(notebook_of(page))
    client = NotebookClient(notebook, timeout=LIMIT_S, resources={"metadata": {"path": str(folder)}})
    client.create_kernel_manager()
    # A kernel of this Python, whatever is installed.
    client.km.kernel_cmd = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]  # pyright: ignore
    results: list[Ran | Drawn] = []
    with tempfile.TemporaryDirectory(prefix="evenly-") as sockets:  # no port; a socket's path must be short
        client.km.transport, client.km.ip = "ipc", f"{sockets}/kernel"  # pyright: ignore
        try:
            with client.setup_kernel(env=prepare(folder)):
                for number, command in enumerate(commands):
                    cell = notebook.cells[number]
                    client.execute_cell(cell, number)
                    if command is not None:
                        results.append(Ran(command, printed_lines(_text_of(cell), folder), _exit_code(client)))
        finally:
            saved.write_text(as_file(notebook), encoding="utf-8")
    return [*results, *drawn_in(folder, page)]


def _text_of(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def _exit_code(client: Any) -> int:
    """Asked by a cell that the notebook does not keep."""
    import nbformat

    cell: Any = nbformat.v4.new_code_cell(EXIT_CODE)
    client.nb.cells.append(cell)
    client.execute_cell(cell, len(client.nb.cells) - 1, store_history=False)
    client.nb.cells.pop()
    return int(_text_of(cell))


# ------------------------------------------------------------------------------------------------------ the tutorial
def run_chapter(page: Path, folder: Path) -> tuple[float, float, list[str]]:
    """Seconds as a page and as a notebook, both run in new folders below `folder`, and what differs, in words."""
    from nbclient.exceptions import CellExecutionError

    shutil.rmtree(folder, ignore_errors=True)
    (folder / "page").mkdir(parents=True)
    (folder / "notebook").mkdir()
    begin = time.monotonic()
    as_page = [*run_page(page, quick=False, folder=folder / "page")]
    between = time.monotonic()
    broken, as_notebook = "", []
    try:
        as_notebook = run_notebook(page, folder / "notebook", folder / f"{page.stem}.ipynb")
    except CellExecutionError as problem:
        broken = f"{page.relative_to(ROOT)}, as a notebook: {problem.ename}: {problem.evalue}"
    end = time.monotonic()
    differing = [broken] * bool(broken) + [
        f"{page.relative_to(ROOT)}:{result.line}, as a {form}: {result.what}\n{result.problem}"
        for form, results in (("page", as_page), ("notebook", as_notebook))
        for result in results
        if result.problem
    ]
    return between - begin, end - between, differing


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.notebooks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("chapters", nargs="*", type=Path)
    asked = [page.resolve() for page in parser.parse_args().chapters] or chapters()
    print(f"{'chapter':24}{'page':>8}{'notebook':>10}", flush=True)
    rows: list[tuple[float, float]] = []
    problems: list[str] = []
    for page in asked:
        page_s, notebook_s, differing = run_chapter(page, FOLDER / page.stem)
        rows.append((page_s, notebook_s))
        problems += differing
        print(f"{page.stem:24}{page_s:6.0f} s{notebook_s:8.0f} s{'  differs' if differing else ''}", flush=True)
    print(f"{'all':24}{sum(row[0] for row in rows):6.0f} s{sum(row[1] for row in rows):8.0f} s")
    print("\n\n".join(["", *problems]) if problems else f"Executed notebooks are in {FOLDER.relative_to(ROOT)}/.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

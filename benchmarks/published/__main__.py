"""Holds the planner's predictions against published measurements.

python -m benchmarks.published                      training.csv, figures per source
python -m benchmarks.published --csv FILE --json    any file of these columns, as one JSON document
python -m benchmarks.published --rows --plot a.svg  every row, and a picture
python -m benchmarks.published --write-docs         docs/accuracy.md and its picture anew
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.published.compare import Predict, compare, document
from benchmarks.published.picture import draw
from benchmarks.published.rows import TRAINING, read
from benchmarks.published.tables import CAPTION, rows_table, skipped_table, sources_table, wrong_fits
from evenly.errors import EvenlyError, UserError

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- figures: python -m benchmarks.published --write-docs -->", "<!-- end of figures -->"


def main(arguments: Sequence[str] | None = None, predict: Predict | None = None) -> int:
    """The exit code: 1 where a prediction failed unforeseen, 2 where a file cannot be read or written.

    predict: `cases.predict_row` unless given.
    """
    options = _options(arguments)
    try:
        compared = compare(read(options.csv), predict or _predict_row())
        found = document(compared, rows=True)
        _write(options, found)
    except EvenlyError as problem:
        print(problem, file=sys.stderr)
        return problem.exit_code
    return int(any(each.fault for each in compared))


def docs_page(page: str, found: Mapping[str, Any]) -> str:
    """The page with its figures anew, between the marks; UserError where they are missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UserError("docs/accuracy.md was to get new figures.", "its marks are missing", f"Keep {BEGIN} and {END}.")
    wrong = f"\n\n{wrong_fits(found)}" if wrong_fits(found) else ""
    return f"{before}{BEGIN}\n\n{sources_table(found)}\n\n{CAPTION}{wrong}\n\n{skipped_table(found)}\n\n{END}{after}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--csv", type=Path, default=TRAINING, help="published runs (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    parser.add_argument("--rows", action="store_true", help="every row besides")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write an SVG there")
    parser.add_argument(
        "--write-docs", action="store_true", help="write docs/accuracy.md and docs/pictures/published.svg"
    )
    return parser.parse_args(arguments)


def _predict_row() -> Predict:
    """Imported here: reading a file and its figures need no predictor."""
    from benchmarks.published.cases import predict_row

    return predict_row


def _write(options: argparse.Namespace, found: Mapping[str, Any]) -> None:
    if options.plot:
        _save(options.plot, draw(found))
    if options.write_docs:
        page = DOCS / "accuracy.md"
        _save(page, docs_page(page.read_text(), found))
        _save(DOCS / "pictures" / "published.svg", draw(found))
    shown = {key: value for key, value in found.items() if options.rows or key != "rows"}
    print(json.dumps(shown, indent=1) if options.json else _tables(shown))


def _tables(shown: Mapping[str, Any]) -> str:
    rows = [rows_table(shown)] if "rows" in shown else []
    parts = [*rows, sources_table(shown), CAPTION, wrong_fits(shown), skipped_table(shown)]
    return "\n\n".join(part for part in parts if part)


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as problem:
        raise UserError(f"{path} was to be written.", str(problem), "Name a file in a folder that exists.") from problem


if __name__ == "__main__":
    sys.exit(main())

"""Lines of user code per runner: between the markers, without blanks, comments and instrumentation.

A line that ends in `# rec.` does not count: it records, or is half of a line that was too long for one.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

MARKER = re.compile(r"\s*# --- (user|eval|end)")
SKIP = re.compile(r"^\s*(#|rec\.|seen\b)|#\s*rec\.\s*$|^\s*$|^\s*\S*\s*# fmt")
IMPORT = re.compile(r"^(?:import|from) (?!pathlib|sys|os|recorder|workloads|datetime|__future__|evenly_job)", re.M)


def count(source: str) -> Counter[str]:
    """Lines of "user" and "eval" code, and imports."""
    counts = Counter(imports=len(IMPORT.findall(source)))
    where = None
    for line in source.splitlines():
        if marker := MARKER.match(line):
            where = None if marker[1] == "end" else marker[1]
        elif where and not SKIP.search(line):
            counts[where] += 1
    return counts


def main() -> None:
    totals: dict[str, Counter[str]] = {}
    for file in sorted(Path(__file__).with_name("runners").glob("*.py")):
        name = file.stem.removesuffix("_job").rstrip("_")  # a job and the loop that trains it count as one
        totals[name] = totals.get(name, Counter()) + count(file.read_text())
    for name, counts in totals.items():
        lines = f"training {counts['user']:3d}  evaluation {counts['eval']:3d}"
        print(f"{name:20s} {lines}  imports {counts['imports']}")


if __name__ == "__main__":
    main()

"""Writing a page that a command draws."""

from __future__ import annotations

import sys
from pathlib import Path

from evenly.errors import UserError


def write_page(path: Path, text: str) -> None:
    """Writes it, and says where. Raises `UserError` where it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as problem:
        raise UserError(f"write {path}", str(problem), "name a file that can be written") from None
    print(f"pictures in {path}", file=sys.stderr)

"""Records of files that a test has written or altered."""

from __future__ import annotations

from pathlib import Path

from evenly.checkpoint.manifest import FileRecord, hash_file


def record_file(path: Path) -> FileRecord:
    """Size and hash of a file."""
    return FileRecord(path.stat().st_size, hash_file(path))

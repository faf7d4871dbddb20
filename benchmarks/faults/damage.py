"""Damage to checkpoints, by name, and to the folders that they are in."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

from evenly.checkpoint.folder import MANIFEST, PARTIAL, CheckpointFolder

KINDS = (
    "truncated",
    "bit-flipped",
    "file-missing",
    "manifest-torn",
    "manifest-missing",
    "manifest-altered",
    "partial-left",
    "empty-folder",
    "foreign-file",
)
# What takes nothing of the newest checkpoint away.
HARMLESS = ("partial-left", "empty-folder")


FORBID_LIMIT_S = 10.0


def damage_newest(out: Path, kind: str) -> None:
    """Damages the newest checkpoint in `out`, or puts beside it what nobody has asked for."""
    folder = CheckpointFolder(out)
    damage(folder, folder.steps()[-1], kind)


def damage(folder: CheckpointFolder, step: int, kind: str) -> None:
    """Damages the checkpoint of `step`."""
    place = folder.path(step)
    file = max(place.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    manifest = place / MANIFEST
    match kind:
        case "truncated":
            file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])
        case "bit-flipped":
            text = bytearray(file.read_bytes())
            text[len(text) * 3 // 4] ^= 4
            file.write_bytes(text)
        case "file-missing":
            file.unlink()
        case "manifest-torn":
            manifest.write_text(manifest.read_text()[: manifest.stat().st_size // 2])
        case "manifest-missing":
            manifest.unlink()
        case "manifest-altered":
            found = json.loads(manifest.read_text())
            found["step"] = step + 1
            manifest.write_text(json.dumps(found))
        case "partial-left":
            partial = folder.checkpoints / f"{PARTIAL}step-{step + 30:08d}"
            shutil.copytree(place, partial)
            (partial / MANIFEST).unlink()
        case "empty-folder":
            folder.path(step + 30).mkdir()
        case "foreign-file":
            shutil.copy(file, place / "other.safetensors")
        case _:
            raise ValueError(f"no damage is called {kind!r}")


def fill(folder: Path) -> None:
    """Takes all room of the file system."""
    with (folder / "ballast").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


def forbid(folder: Path) -> None:
    """Lets nobody write in it who comes from now on, root included."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    until = time.monotonic() + FORBID_LIMIT_S
    while subprocess.run(["mount", "-o", "remount,bind,ro", folder], capture_output=True).returncode:
        if time.monotonic() > until:  # somebody writes there
            raise TimeoutError(f"{folder} could not be made read-only")
        time.sleep(0.01)

"""The libraries of a job, imported once for all ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from evenly.launcher.preload import import_libraries


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "library_that_raises.py").write_text("raise RuntimeError\n")
    (tmp_path / "lazy_library.py").write_text(
        "asked = []\nprint('imported')\ndef __getattr__(name):\n    asked.append(name)\n    return name\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "lazy_library", raising=False)


@pytest.mark.usefixtures("libraries")
def test_libraries_are_imported_whatever_one_of_them_raises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("evenly.launcher.preload.may_have_gpus", lambda: False)
    import_libraries(["no_such_library", "library_that_raises", "lazy_library:Model"])
    assert "Model" in sys.modules.pop("lazy_library").asked
    assert capsys.readouterr() == ("", "imported\n")  # stdout is for a JSON document


@pytest.mark.usefixtures("libraries")
def test_nothing_is_imported_where_there_may_be_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenly.launcher.preload.may_have_gpus", lambda: True)
    import_libraries(["lazy_library"])
    assert "lazy_library" not in sys.modules


def test_a_launcher_leaves_what_trains_to_its_ranks() -> None:
    program = (
        "import sys, evenly.train.loop, evenly.train.options; sys.exit('; '.join("
        "{'evenly.train.run', 'torch._dynamo', 'torch.distributed.tensor'} & {*sys.modules}) or 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

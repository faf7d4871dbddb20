"""The names of all files in a run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LONGEST_NUMBER = 30  # digits: beyond, it is no number that a run has written, and no float


def whole_number(text: str) -> int:
    """`int` for numbers in a run's files. Raises `ValueError` for what no run writes."""
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


@dataclass(frozen=True)
class RunFolder:
    """The folder that a run writes into."""

    root: Path

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def metrics(self) -> Path:
        """Steps and evaluations, one JSON object per line."""
        return self.root / "metrics.jsonl"

    @property
    def attempts(self) -> Path:
        """The plans that it was started under, one JSON object per line: see `observe.attempts`."""
        return self.root / "attempts.jsonl"

    @property
    def model_config(self) -> Path:
        """The class and the config of a transformers model, from which an export is read again."""
        return self.root / "model_config.json"

    @property
    def adapter(self) -> Path:
        """Of which tensors the adapter of a peft model is made, and its configuration."""
        return self.root / "adapter.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def logger(self, name: str) -> Path:
        """What the logger `name` has to know where the run goes on, one JSON document."""
        return self.root / "loggers" / f"{name}.json"

    def events(self, rank: int) -> Path:
        """Events of `rank` (started, evaluated, saved, ended), one JSON object per line."""
        return self.root / "events" / f"rank{rank}.jsonl"

    def ranks_with_events(self) -> list[int]:
        numbers = (path.stem.removeprefix("rank") for path in (self.root / "events").glob("rank*.jsonl"))
        return sorted(int(number) for number in numbers if number.isdecimal() and len(number) < LONGEST_NUMBER)

    def timeline(self, rank: int) -> Path:
        return self.root / "timeline" / f"rank{rank}.jsonl"

    def timelines(self) -> Iterator[Path]:
        return (self.root / "timeline").glob("rank*.jsonl")

    @property
    def holds_run(self) -> bool:
        """Whether a run has done a step here; a start that has failed leaves only what may be written again."""
        begun = self.metrics.exists() and self.metrics.stat().st_size > 0
        return begun or any(self.checkpoints.glob("step-*"))

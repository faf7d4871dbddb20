"""What one reader of a stream takes for all ranks, and what it takes off them to decode in `collate`.

    python benchmarks/streams/rates.py [ROUNDS]

A tiny model under ddp on two and four ranks; rank 0 reads and hands out. Of each kind of samples: the processor time of
every rank for a sample of the global batch, in microseconds, the least of the rounds, which a busy machine hardly
changes. The largest of them says how fast the ranks can get on where each has a core of its own. Pictures are JPEG of
512 x 512, decoded in the stream (by rank 0 alone), or in `collate` (by the rank that trains on them). Kept in
benchmarks/results/streams.json.
"""

from __future__ import annotations

import io
import itertools
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import evenly
from evenly.launcher.agent import Launch, start_ranks

RESULTS = Path(__file__).parents[1] / "results" / "streams.json"
RANKS = (2, 4)
STEPS, WARM = 22, 2
SIDE, PICTURES, STRIDE = 512, 16, 16
MEBIBYTE = 1 << 20


def picture(number: int) -> bytes:
    """A JPEG of SIDE x SIDE pixels, about 100 KB."""
    draw = np.random.default_rng(number)
    squares = draw.integers(0, 255, (SIDE // 8, SIDE // 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(np.kron(squares, np.ones((8, 8, 1), dtype=np.uint8))).save(file, "JPEG", quality=90)
    return file.getvalue()


def decoded(jpeg: bytes) -> torch.Tensor:
    pixels = np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"))
    return torch.from_numpy(pixels[::STRIDE, ::STRIDE].copy()).flatten().float() / 255


def jpegs() -> Iterator[bytes]:
    return itertools.cycle([picture(number) for number in range(PICTURES)])


def decoded_together(samples: list[bytes]) -> torch.Tensor:
    return torch.stack([decoded(one) for one in samples])


def floats() -> Iterator[torch.Tensor]:
    return (torch.full((8,), number % 10 / 10) for number in itertools.count())


def rows() -> Iterator[dict[str, list[int]]]:
    return ({"ids": [number % 50_000] * 128} for number in itertools.count())


def from_rows(samples: list[dict[str, list[int]]]) -> torch.Tensor:
    return torch.tensor([row["ids"] for row in samples]) / 50_000


def mebibytes() -> Iterator[bytes]:
    content = bytearray(MEBIBYTE)
    return (bytes(content) for _ in itertools.count())


def lengths(samples: list[bytes]) -> torch.Tensor:
    return torch.tensor([[len(one) / MEBIBYTE] for one in samples])


# stream, collate, numbers of a collated sample, global batch
Kind = tuple[Callable[[], Any], Callable[[Any], Any] | None, int, int]
KINDS: dict[str, Kind] = {
    "pictures, decoded in the stream": (lambda: map(decoded, jpegs()), None, 3 * (SIDE // STRIDE) ** 2, 64),
    "pictures, decoded in collate": (jpegs, decoded_together, 3 * (SIDE // STRIDE) ** 2, 64),
    "8 floats": (floats, None, 8, 1024),
    "128 numbers in a list, own collate": (rows, from_rows, 128, 1024),
    "1 MiB of bytes, own collate": (mebibytes, lengths, 1, 64),
}


def cpu_us(kind: str) -> float:
    """On a rank: processor time for a sample of the global batch."""
    data, collate, width, batch = KINDS[kind]
    job = evenly.Job(
        model=lambda: torch.nn.Linear(width, 1),
        loss=lambda model, x: model(x).square().mean(),
        data=data,
        collate=collate,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        global_batch=batch,
        microbatch=batch // 8,
        steps=STEPS,
    )
    began = 0.0
    with evenly.start(job, plan="ddp") as run:
        for number, one in enumerate(run.batches()):
            if number == WARM:
                began = time.process_time()
            run.step(one)
        return (time.process_time() - began) / (batch * (STEPS - WARM)) * 1e6


def main() -> None:
    rounds = int(sys.argv[1]) if sys.argv[1:] else 3
    found: dict[str, list[list[float]]] = {}
    for _, count, kind in itertools.product(range(rounds), RANKS, KINDS):
        results = start_ranks(cpu_us, (kind,), Launch(devices=count))
        found.setdefault(f"{kind}, {count} ranks", []).append([results[rank] for rank in sorted(results)])
    machine = {"python": platform.python_version(), "torch": torch.__version__}
    document: dict[str, Any] = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "machine": machine, "rounds": rounds}
    for name, by_round in found.items():
        document[name] = {"cpu_us_per_sample_by_rank": [round(min(one), 1) for one in zip(*by_round, strict=True)]}
        print(name, document[name])
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

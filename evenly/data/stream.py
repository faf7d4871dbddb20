"""Keys of random streams: a function of the job's seed and of a place in the run, and of nothing else.

A place is a path of words and numbers, such as `("microbatch", step, j)`, `("sample", epoch, index)` or
`("model",)`. Whoever runs that place, in whatever order and however often, draws the same numbers.
"""

from __future__ import annotations

from hashlib import blake2b


def stream_key(seed: int, *place: int | str) -> int:
    """A key in [0, 2**63) for the random stream of `place` under `seed`; distinct places give unrelated keys."""
    digest = blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

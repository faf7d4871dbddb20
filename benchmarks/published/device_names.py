"""The device of a published run, from what its source calls it. Pure."""

from __future__ import annotations

import re

from evenly.errors import UserError
from evenly.hardware.devices import known_device

# What no source names, by what it says instead: the capacity, and that four make a node, are a GB200's.
UNNAMED = {"Blackwell SM100 ~184 GiB": "GB200"}
ALLOCATED = 0.985  # of the memory as sold, what programs can have: the least of the kinds of devices.toml
NEAR = 0.1  # memory that differs by less is the kind's own: with ECC programs have less than was sold
MEMORY = re.compile(r"\d+ ?Gi?B$", re.IGNORECASE)
POWER = re.compile(r"\d+ ?W$", re.IGNORECASE)


def device_text(stated: str) -> str | None:
    """The text with which `find_device` has it; None where no such device is known.

    What is behind the name of a kind may be its memory as sold (`A100-64GB`) and a limit to its power (`-500W`); other
    words, such as how it is cooled, change nothing.
    """
    without = re.sub(r"\(.*?\)", " ", stated)
    for text in (stated, without):
        words = " ".join(text.split())
        if (found := UNNAMED.get(words, words)) and known_device(found.partition(":")[0]) is not None:
            return found
    words = [word for word in re.split(r"[\s_/~-]+", without) if word]
    for count in range(len(words) - 1, 0, -1):
        if (known := known_device("-".join(words[:count]))) is not None:
            return _variant(known.name, known.memory_bytes, words[count:])
    return None


def _variant(kind: str, memory_bytes: int, words: list[str]) -> str:
    changes: list[str] = []
    for word in words:
        if MEMORY.match(word):
            gib = ALLOCATED * int(re.sub(r"\D", "", word))
            if abs(gib * 2**30 / memory_bytes - 1) > NEAR:
                changes.append(f"memory={gib:g}GiB")
        elif POWER.match(word):
            changes.append(f"power={word.upper()}")
    text = f"{kind}:{','.join(changes)}" if changes else kind
    try:
        known_device(text)
    except UserError:  # as of a kind whose power is not known
        return kind
    return text

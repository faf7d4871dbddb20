"""How the tensors of a checkpoint are named. No torch here."""

from __future__ import annotations

MODEL, OPTIMIZER = "model.", "optimizer."
# Parts that torch's wrappers put into names.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """A name of a module, parameter or buffer without the parts of torch's wrappers."""
    for part in WRAPPERS:
        name = name.replace(part, "")
    return name

"""The values of a transformers config file, each checked before it is used; sizes under the names that families have
for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenly.planner.shape import Activation, limits

# One size under the names that families have for it.
HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
FFN = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff")
SEQUENCE = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "quick_gelu")
PLAIN: dict[str, Activation] = {**dict.fromkeys(GELU, "gelu"), "relu": "relu", "relu2": "squared-relu"}
GATED: dict[str, Activation] = {**dict.fromkeys(GELU, "geglu"), "silu": "swiglu", "swish": "swiglu"}


class ConfigValues:
    """A mapping of which every value that is read is checked; `problems` collects what is wrong."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values, self.prefix = values, prefix
        self.problems: list[str] = []

    def given(self, *names: str) -> tuple[str, Any]:
        """The first of `names` that has a value, and it; the first name and None where none has."""
        found = ((name, value) for name in names if (value := self.values.get(name)) is not None)
        return next(found, (names[0], None))

    def refuse(self, name: str, value: object, wanted: str) -> None:
        shown = repr(value)
        self.problems.append(
            f"{self.prefix}{name} is {shown if len(shown) <= 40 else shown[:37] + '...'}, not {wanted}"
        )

    def size(self, *names: str, default: int | None = None, as_field: str = "hidden") -> int:
        """A whole number within what `Shape` allows for `as_field`; 1 after a problem."""
        name, value = self.given(*names)
        least, most = limits(as_field)
        if value is None and default is not None:
            return default
        if value is None:
            self.problems.append(f"{self.prefix}{' or '.join(names)} is missing")
        elif type(value) is not int or not least <= value <= most:
            self.refuse(name, value, f"a whole number from {least} to {most}")
        else:
            return value
        return max(1, least)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is not None and type(value) is not bool:
            self.refuse(name, value, "true or false")
        return value if type(value) is bool else default

    def word(self, *names: str, default: str) -> str:
        name, value = self.given(*names)
        if value is not None and not isinstance(value, str):
            self.refuse(name, value, "a word")
        return value if isinstance(value, str) else default

    def table(self, name: str) -> ConfigValues:
        """A mapping within this one, empty where it is left out; its problems are reported with these."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, Mapping):
            self.refuse(name, value, "a table")
        inner = ConfigValues(value if isinstance(value, Mapping) else {}, f"{self.prefix}{name}.")
        inner.problems = self.problems
        return inner

    def must(self, name: str, default: object, *allowed: object) -> None:
        """Refuses a model that a shape cannot describe."""
        _, value = self.given(name)
        if (default if value is None else value) not in allowed:
            self.refuse(name, value, " or ".join(map(repr, allowed)))

    def activation(self, known: dict[str, Activation], *names: str, default: str) -> Activation:
        word = self.word(*names, default=default)
        if word not in known:
            self.refuse(names[0], word, f"one of {', '.join(known)}")
        return known.get(word, "gelu")

"""Which jobs are run in which labs, and under which families of plans. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.lab.lab import Lab

JOBS: dict[str, tuple[str, dict[str, object]]] = {
    "stdlib_lm": ("stdlib_lm", {"width": 256, "layers": 4}),
    "gpt2": ("gpt2", {"width": 256, "layers": 4}),
    "llama": ("llama", {"width": 256, "layers": 4}),
    "resnet": ("resnet", {"width": 32}),
    "vit": ("vit", {"width": 256, "layers": 4}),
    "t5": ("t5", {"width": 192, "layers": 3}),
}

# On two cores: where there are four devices, each has half of one, which no other gets while it waits.
LABS: dict[str, Lab] = {
    "2x1-50": Lab(name="r", nodes=2, bandwidth="50mbit"),
    "2x1-200": Lab(name="r", nodes=2, bandwidth="200mbit"),
    "2x1-1000": Lab(name="r", nodes=2, bandwidth="1000mbit"),
    "2x1-free": Lab(name="r", nodes=2),
    "4x1-200": Lab(name="r", nodes=4, bandwidth="200mbit"),
    "4x1-free": Lab(name="r", nodes=4, cores=0.5),
    "2x2-200": Lab(name="r", nodes=2, devices=2, bandwidth="200mbit"),
    "4x1-slow-link": Lab(name="r", nodes=4, cores=0.5, bandwidth="200mbit", slow_links={3: "50mbit"}),
    "2x1-slow-node": Lab(name="r", nodes=2, bandwidth="200mbit", slow_nodes={1: 0.5}),
}

SCHEDULES = ("1f1b", "zero-bubble")
OF_TWO = (
    *("data=2 zero=0", "data=2 zero=1", "data=2 zero=2", "data=2 zero=3 shard=2", "tensor=2"),
    *(f"pipeline=2 schedule={schedule}" for schedule in SCHEDULES),
)
OF_FOUR = (
    *("data=4 zero=0", "data=4 zero=1", "data=4 zero=2", "data=4 zero=3 shard=4", "tensor=4"),
    *(f"pipeline=4 schedule={schedule}" for schedule in SCHEDULES),
    *("data=2 tensor=2 zero=0", "data=2 pipeline=2 zero=0", "tensor=2 pipeline=2"),
)
FAMILIES = {2: OF_TWO, 4: OF_FOUR}
AUTO = "auto"


@dataclass(frozen=True)
class Pair:
    """A job in a lab, by their names."""

    job: str
    lab: str
    families: tuple[str, ...] = field(init=False)

    @property
    def steps(self) -> int:
        """That are measured, the same of all plans, as samples may differ."""
        return 8 if self.lab in ("2x1-1000", "2x1-free", "4x1-free") else 4

    def __post_init__(self) -> None:
        lab = LABS[self.lab]
        object.__setattr__(self, "families", FAMILIES[lab.nodes * lab.devices])

    def __str__(self) -> str:
        return f"{self.job} on {self.lab}"


PAIRS = [
    *(Pair("stdlib_lm", lab) for lab in ("2x1-200", "2x1-1000", "4x1-slow-link")),
    *(Pair("gpt2", lab) for lab in ("2x1-50", "4x1-200", "2x2-200")),
    *(Pair("llama", lab) for lab in ("2x1-200", "2x2-200")),
    *(Pair("resnet", lab) for lab in ("2x1-50", "4x1-free")),
    *(Pair("vit", lab) for lab in ("2x1-slow-node",)),
    *(Pair("t5", lab) for lab in ("2x1-free", "4x1-200")),
]

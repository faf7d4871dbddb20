"""What recipes of Megatron-Bridge compute again and keep in the host's memory, which its tables of results leave out.

From scripts/performance/configs/llama/*_workload_base_configs.py of NVIDIA-NeMo/Megatron-Bridge (at 00919dcf and
0013c9a8). A run is known by its model, device, axes and microbatch; another plan may have been run with anything.
None of these computes anything again; one that does (8B on H100 in 8 bits, without FSDP) is left out.
"""

from __future__ import annotations

from typing import NamedTuple


class Recipe(NamedTuple):
    """tensor, pipeline, context: ranks of axes. sharded: by FSDP. offloaded: blocks kept in the host's memory."""

    tensor: int
    pipeline: int
    context: int
    microbatch: int
    sharded: bool = False
    offloaded: int = 0


# By size of the model in 10^9 parameters, kind of device, and whether products have 16 bits.
RECIPES: dict[tuple[int, str, bool], tuple[Recipe, ...]] = {
    (70, "GB300", True): (Recipe(1, 1, 1, 2, True, 30), Recipe(1, 2, 1, 1)),
    (70, "GB300", False): (Recipe(1, 1, 1, 2, True, 20), Recipe(1, 4, 1, 1), Recipe(1, 2, 1, 1)),
    (70, "GB200", True): (Recipe(1, 1, 1, 1, True, 20), Recipe(1, 8, 1, 1)),
    (70, "GB200", False): (Recipe(1, 1, 1, 2, True, 40), Recipe(2, 4, 1, 1), Recipe(1, 8, 1, 1)),
    (70, "B300", True): (Recipe(1, 1, 1, 1, True),),
    (70, "B300", False): (Recipe(1, 1, 1, 1, True), Recipe(1, 4, 1, 1)),
    (70, "B200", True): (Recipe(2, 4, 2, 1),),
    (70, "B200", False): (Recipe(1, 1, 1, 1, True, 5), Recipe(2, 4, 1, 1)),
    (70, "H100-80", True): (Recipe(4, 4, 2, 1), Recipe(4, 4, 1, 1)),
    (70, "H100-80", False): (Recipe(4, 8, 1, 1), Recipe(4, 4, 1, 1), Recipe(8, 4, 1, 1)),
    (405, "GB300", True): (Recipe(2, 1, 1, 1, True, 40),),
    (405, "GB300", False): (Recipe(2, 1, 1, 1, True, 10), Recipe(4, 8, 2, 1), Recipe(4, 8, 1, 1), Recipe(2, 8, 2, 1)),
    (405, "GB200", True): (Recipe(4, 8, 2, 1), Recipe(4, 16, 1, 1)),
    (405, "GB200", False): (Recipe(2, 1, 1, 1, True, 92), Recipe(4, 8, 2, 1), Recipe(4, 16, 1, 1)),
    (405, "B300", True): (Recipe(2, 8, 1, 1),),
    (405, "B300", False): (Recipe(2, 8, 1, 1), Recipe(4, 8, 2, 1)),
    (405, "B200", True): (Recipe(4, 8, 2, 1),),
    (405, "B200", False): (Recipe(4, 8, 2, 1), Recipe(4, 16, 1, 1)),
    (405, "H100-80", True): (Recipe(8, 8, 2, 1),),
    (405, "H100-80", False): (Recipe(8, 8, 2, 1),),
    (8, "GB300", True): (Recipe(1, 1, 1, 4), Recipe(1, 1, 1, 2)),
    (8, "GB300", False): (Recipe(1, 1, 1, 4), Recipe(1, 1, 1, 2)),
    (8, "GB200", True): (Recipe(1, 1, 1, 2), Recipe(1, 1, 1, 1)),
    (8, "GB200", False): (Recipe(1, 1, 1, 2), Recipe(1, 1, 1, 4), Recipe(1, 1, 1, 1)),
    (8, "B300", True): (Recipe(1, 1, 1, 4),),
    (8, "B300", False): (Recipe(1, 1, 1, 4),),
    (8, "B200", True): (Recipe(1, 1, 1, 2),),
    (8, "B200", False): (Recipe(1, 1, 1, 2), Recipe(1, 1, 1, 4)),
    (8, "H100-80", True): (Recipe(1, 1, 2, 1),),
    (8, "H100-80", False): (Recipe(1, 1, 1, 1, True),),
}


def recipe_of(billions: int, kind: str, plan: Recipe, *, wide: bool) -> Recipe | None:
    """The recipe whose model, device, axes and microbatch are those of `plan`; None where there is none."""
    known = RECIPES.get((billions, kind, wide), ())
    return next((one for one in known if one[:5] == plan[:5]), None)

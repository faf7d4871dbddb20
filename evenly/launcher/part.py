"""The ranks of one node among those of a run on several."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NodePart:
    """What the ranks of one node are of a world on several.

    node, nodes: its place among the members, and their number. first_rank: of this node. size: of the world.
    round: of the run; the store has keys of its own for each. port: of the store, on loopback. interface: that ranks
    use to talk.
    """

    node: int
    nodes: int
    first_rank: int
    size: int
    round: int
    port: int
    interface: str

    def variables(self, local_rank: int) -> dict[str, str]:
        """What a rank finds in its environment; to the agent, which sets the like, its node is the only one."""
        rank = self.first_rank + local_rank
        numbers = {
            **dict.fromkeys(("RANK", "ROLE_RANK"), rank),
            **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), self.size),
            "GROUP_RANK": self.node,
            "GROUP_WORLD_SIZE": self.nodes,
            "TORCHELASTIC_RESTART_COUNT": self.round,
        }
        return {name: str(number) for name, number in numbers.items()}

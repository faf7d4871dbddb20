"""The repeated layers of any module: what is gathered together, recomputed together, or put on one stage.

A *list* is a container (`ModuleList`, `Sequential`, `ModuleDict`) with two or more children of one class that
themselves have children and hold parameters. Its items are *blocks* if most of them have parameters of the same shapes,
or most of their parameters. Where they differ (the stages of a Swin transformer, of a ResNet), or are containers that
nothing calls, they are looked into, and an item without a list inside is a block itself. What lies inside a block is
not looked into: the experts of one layer are part of it. Lists much smaller than the largest (two heads besides a
tower) are no blocks, unless of the same class. A model without such lists is searched for children of one class that
are no list (`self.block1`, `self.block2`), then for a `ModuleList` of several classes, for lists of one, which may be
called again and again, and for lists of plain layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from evenly.model.norms import keeps_statistics

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
LEAST_SHARE = 0.1  # of the largest list's parameters


@dataclass(frozen=True)
class Block:
    """One block and its qualified name in the model."""

    name: str
    module: nn.Module


def find_blocks(model: nn.Module) -> list[Block]:
    """The blocks of `model` in the order of its definition; none where nothing repeats. No block contains another."""
    kinds = (_composite_in_container, _composite, _composite_in_list, _alone_in_container, _plain_in_container)
    for may_repeat in kinds:
        lists = list(_lists("", model, may_repeat))
        if lists:
            least = LEAST_SHARE * max(_size(found) for found in lists)
            classes = {type(block.module) for found in lists if _size(found) >= least for block in found}
            return _once(block for found in lists for block in found if type(block.module) in classes)
    return []


def find_recomputed(model: nn.Module, blocks: Sequence[Block]) -> Sequence[Block]:
    """What is recomputed one by one: `blocks`, or where nothing repeats the model's children that hold parameters."""
    children = (Block(name, child) for name, child in model.named_children())
    return recomputable(blocks or [child for child in children if any(True for _ in child.module.parameters())])


def recomputable(blocks: Iterable[Block]) -> list[Block]:
    """Those that may be computed a second time by themselves.

    Of a layer with running statistics, what keeps its second forward out of them lies around its forward.
    """
    return [block for block in blocks if not keeps_statistics(block.module)]


def _lists(name: str, module: nn.Module, may_repeat: Callable[[nn.Module, nn.Module], bool]) -> Iterable[list[Block]]:
    chosen: set[int] = set()
    for items in _like_children(name, module, may_repeat):
        chosen.update(id(item.module) for item in items)
        if _alike(items) and all(_is_called(item.module) for item in items):
            yield items
            continue
        inner = [list(_lists(item.name, item.module, may_repeat)) for item in items]
        if any(inner):
            # One list: the stages of one tower follow each other.
            yield [
                block
                for item, lists in zip(items, inner, strict=True)
                for block in ([b for found in lists for b in found] or _called(item))
            ]
        elif called := [block for item in items for block in _called(item)]:
            yield called
    for child_name, child in module.named_children():
        if id(child) not in chosen:
            yield from _lists(_joined(name, child_name), child, may_repeat)


def _like_children(
    name: str, module: nn.Module, may_repeat: Callable[[nn.Module, nn.Module], bool]
) -> Iterable[list[Block]]:
    by_class: dict[type, list[Block]] = {}
    for child_name, child in module.named_children():
        if may_repeat(module, child) and any(True for _ in child.parameters()):
            kind = nn.Module if may_repeat is _composite_in_list else type(child)
            by_class.setdefault(kind, []).append(Block(_joined(name, child_name), child))
    least = 1 if may_repeat is _alone_in_container else 2
    return [items for items in by_class.values() if len(items) >= least]


def _composite_in_container(parent: nn.Module, child: nn.Module) -> bool:
    return isinstance(parent, CONTAINERS) and _composite(parent, child)


def _composite(parent: nn.Module, child: nn.Module) -> bool:
    return any(True for _ in child.children())


def _plain_in_container(parent: nn.Module, child: nn.Module) -> bool:
    return isinstance(parent, CONTAINERS)


def _composite_in_list(parent: nn.Module, child: nn.Module) -> bool:
    return isinstance(parent, nn.ModuleList) and _composite(parent, child)


def _alone_in_container(parent: nn.Module, child: nn.Module) -> bool:
    return _composite_in_container(parent, child) and len(parent) == 1  # type: ignore[arg-type]


def _alike(items: Sequence[Block]) -> bool:
    shapes = Counter(frozenset((n, tuple(p.shape)) for n, p in item.module.named_parameters()) for item in items)
    return any(
        2 * sum(count for other, count in shapes.items() if 2 * len(one & other) > len(one | other)) > len(items)
        for one in shapes
    )


def _is_called(module: nn.Module) -> bool:
    """Whether it can be called: a `ModuleList` without a forward only holds others."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return True
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _called(item: Block) -> list[Block]:
    """`item`, or what a container that nothing calls holds in its place."""
    if _is_called(item.module):
        return [item]
    children = (Block(_joined(item.name, name), child) for name, child in item.module.named_children())
    return [block for child in children if any(True for _ in child.module.parameters()) for block in _called(child)]


def _size(items: Sequence[Block]) -> int:
    return sum({id(p): p.numel() for item in items for p in item.module.parameters()}.values())


def _once(blocks: Iterable[Block]) -> list[Block]:
    first: dict[int, Block] = {}
    for block in blocks:
        first.setdefault(id(block.module), block)
    inside = {id(part) for block in first.values() for part in block.module.modules() if part is not block.module}
    return [block for key, block in first.items() if key not in inside]


def _joined(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child

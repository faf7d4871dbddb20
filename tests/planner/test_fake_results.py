"""What operations on fake tensors make, taken from what they made before, is what torch makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from evenly.data.nest import tensors_in
from evenly.planner.fake_results import FakeResults
from evenly.planner.partly_fake import PartlyFake
from evenly.planner.profile_recorder import profile_module
from evenly.torch_private import fake_mode, is_fake, memory_key

Form = tuple[Any, ...]


class Recipes(FakeResults):
    """Counts how often an operation had to run."""

    ran = 0

    def find(self, *given: Any) -> None:
        self.ran += 1
        super().find(*given)


OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "numbers of another type": lambda x, y: ((x > 0) + 1, (x > 0) + 1.0, x.to(torch.float64), x + 1, x.long() + 1),
    "product": lambda x, y: (x @ y.t(), x.double() @ y.double().t()),
    "views": lambda x, y: (x.t(), x[1:, ::2], x.view(3, 8), x.expand(2, 4, 6)[1], x[None].squeeze(0)),
    "views of views": lambda x, y: x[1:].t()[2:].reshape(-1),
    "lists": lambda x, y: (torch.cat([x, y]), torch.cat([x, y], 1), *x.split([1, 3]), *torch.split(y, 2)),
    "several results": lambda x, y: (*torch.native_dropout(x, 0.1, True), *x.max(0), *torch.sort(y, 1)),
    "in place": lambda x, y: x.mul_(2).add_(y),
    "written elsewhere": lambda x, y: torch.add(x, y, out=torch.empty_like(x)),
    "strides": lambda x, y: (x.t() + 1, x.t().contiguous(), torch.empty_like(x.t()), y.t().clone()),
    "an index": lambda x, y: (x[torch.tensor([1, 3])], x.gather(1, y.long()), x.index_select(0, torch.tensor([2, 2]))),
    "with numbers": lambda x, y: (x + torch.ones(6), torch.where(torch.ones(4, 1) > 0, x, y)),
    "complex": lambda x, y: (torch.complex(x, y).imag, torch.fft.rfft(x)),
    "scalars": lambda x, y: (x.sum(), x.sum() * y.mean(), x.norm()),
}


def forms(results: Any, given: list[torch.Tensor]) -> list[Form]:
    """Of every result its shape and the like, and which of the tensors before shares its memory."""
    found, keys = list[Form](), [memory_key(one) for one in given]
    for one in tensors_in(results):
        assert is_fake(type(one)) and one.device == torch.device("cpu")
        keys.append(memory_key(one))
        sizes = one.shape, one.stride(), one.storage_offset(), one.dtype, one.untyped_storage().nbytes()
        found.append((*sizes, keys.index(keys[-1]), next((n for n, other in enumerate(given) if other is one), None)))
    return found


def run(operation: Callable[[torch.Tensor, torch.Tensor], Any], results: FakeResults, rows: int = 4) -> list[Form]:
    mode = PartlyFake(results)
    with mode.fakes:
        given = [torch.ones(rows, 6), torch.ones(rows, 6)]
    with mode:
        return forms(operation(*given), given)


def by_torch(operation: Callable[[torch.Tensor, torch.Tensor], Any]) -> list[Form]:
    """As `run`, with torch's own mode alone."""
    with fake_mode():
        given = [torch.ones(4, 6), torch.ones(4, 6)]
        return forms(operation(*given), given)


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_are_those_of_torch_the_second_time(name: str) -> None:
    known = Recipes()
    first = run(OPERATIONS[name], known)
    ran = known.ran
    assert run(OPERATIONS[name], known) == first == by_torch(OPERATIONS[name])
    assert ran and (known.ran == ran or name in ("complex", "an index"))


def test_other_shapes_have_other_results() -> None:
    known = Recipes()
    for rows in (4, 5, 4, 5):
        for one in run(lambda x, y: (x @ y.t(), x + y), known, rows):
            assert one[0][0] == rows


def test_what_changes_a_shape_in_place_runs_each_time() -> None:
    for _ in range(2):
        found = run(lambda x, y: (x.t_(), x.unsqueeze_(0) + 1), known := FakeResults())
        assert [one[0] for one in found] == [(1, 6, 4), (1, 6, 4)]
        assert run(lambda x, y: (x.t_(), x.unsqueeze_(0) + 1), known) == found


class Blocks(nn.Module):
    """Attention, norms, dropout and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.words(ids), src_key_padding_mask=ids == 0) @ self.words.weight.t()


def blocks_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="sum")


def test_the_profile_of_a_model_is_the_same_by_what_is_known() -> None:
    model, known = Blocks(), FakeResults()
    for shape in ((3, 5), (2, 7), (3, 5)):
        ids = torch.ones(shape, dtype=torch.long)
        found = profile_module(model, blocks_loss, ids, results=known)
        assert found == profile_module(model, blocks_loss, ids)
        assert found.works and found.intervals

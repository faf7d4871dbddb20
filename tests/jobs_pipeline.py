"""Jobs whose models are chains of eight blocks or more, and what stands between, before and behind such blocks.

    evenly verify tests/jobs_pipeline.py --plans "ddp;zero3" --set name=several

Hidden states that skip blocks, several tensors from block to block, inputs that every block takes, blocks that are
called twice or not at all, tied weights, statistics, losses that look at parameters or call the model twice. Dropout
is on in all, gradients are clipped, and the microbatches of a step weigh differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from jobs import Points, Sentences, pad, token_loss, warm_up
from jobs_tensor import adam, weighted_class_loss
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import evenly

VOCABULARY, LONGEST, LAYERS, HEADS, WIDTH = 67, 17, 8, 3, 15
MARKER = 1  # a token that some microbatches have, and some have not

Sight = torch.Tensor | None
Several = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """Three heads of five numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.tell, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, sight: Sight = None) -> torch.Tensor:
        """What `x` (B, L, 15) finds in `memory` (B, M, 15).

        sight: who sees whom (bool), or what is added to the scores, either broadcast to (B, 3, L, M); by default each
        sees itself and those before it.
        """
        q = self.ask(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.tell(memory).chunk(2, dim=-1))
        dropout = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, sight, dropout, is_causal=sight is None)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention and MLP, (B, L, 15) -> (B, L, 15)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.drop = Attention(), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 35), nn.Linear(35, WIDTH)

    def forward(self, x: torch.Tensor, sight: Sight = None) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.drop(self.mix(h, h, sight))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_mlp(x)))))


class Chain(nn.Module):
    """Embedding, blocks one after the other, norm and head. Others differ in how they go `through` the blocks."""

    def __init__(self, blocks: Iterable[nn.Module] | None = None) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(0.1 * torch.randn(LONGEST, WIDTH))
        self.blocks = nn.ModuleList(blocks or (Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.embed(tokens) + self.place[: tokens.shape[1]], 0.1, self.training)
        return self.head(self.norm(self.through(x, tokens)))

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Tied(Chain):
    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.embed.weight, std=0.1)
        self.head.weight = self.embed.weight


class SeveralBlock(Block):
    """Takes and returns the hidden state, a second stream of 5 numbers, positions, and who sees whom."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.note, self.recall = nn.Embedding(LONGEST, WIDTH), nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor, places: torch.Tensor, sight: torch.Tensor, *, given: dict[str, Any]
    ) -> Several:
        """Positions (L,) move on by one, and each position comes to see one more that is before it.

        x: (B, L, 15). stream: (B, L, 5). sight: (B, 1, L, L). given: "gain" (5,), "lengths" (B, 1, 1), "scale".
        """
        x = super().forward(x + self.turn(places) + self.recall(stream), sight)
        stream = given["scale"] * stream + torch.tanh(self.note(x)) * given["gain"] / given["lengths"]
        return x, stream, (places + 1) % LONGEST, sight | F.pad(sight, (0, 0, 1, 0))[..., :-1, :]


class SeveralChain(Chain):
    """All may see the markers before them, and at first nobody else but themselves."""

    def __init__(self) -> None:
        super().__init__(SeveralBlock() for _ in range(LAYERS))
        self.begin, self.gain = nn.Linear(WIDTH, 5), nn.Parameter(torch.ones(5))
        self.end = nn.Linear(5, WIDTH)

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        given = {"gain": self.gain, "lengths": (tokens != 0).sum(1).view(-1, 1, 1), "scale": 0.9}
        places = torch.arange(length, device=tokens.device)
        before = (places[:, None] >= places) & (tokens == MARKER)[:, None, None, :]
        state = x, self.begin(x), places, before | torch.eye(length, dtype=torch.bool, device=tokens.device)
        for block in self.blocks:
            state = block(*state, given=given)
        return state[0] + self.end(state[1])


class Skips(Chain):
    """As in a U-Net: what the blocks of the first half return is kept for those of the second, the last first: added,
    or concatenated.
    """

    def __init__(self) -> None:
        super().__init__()
        self.joins = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(LAYERS // 4))

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        for block in self.blocks[: LAYERS // 2]:
            kept.append(x := block(x))
        for number, block in enumerate(self.blocks[LAYERS // 2 :]):
            last = kept.pop()
            x = block(self.joins[number // 2](torch.cat([x, last], dim=-1)) if number % 2 else x + last)
        return x


class First(Chain):
    """The embedding is added before every block, and at the end."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        first = x
        for block in self.blocks:
            x = block(x + 0.3 * first)
        return x + first


class Shared(Chain):
    """So many blocks in turn, eight calls in all: one as in ALBERT, or several."""

    def __init__(self, blocks: int) -> None:
        super().__init__(Block() for _ in range(blocks))

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for call in range(LAYERS):
            x = self.blocks[call % len(self.blocks)](x)
        return x


class Relative(nn.Module):
    """Learned scores by distance, and none for what comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Embedding(LONGEST, HEADS)

    def forward(self, length: int) -> torch.Tensor:
        """(1, 3, length, length)."""
        places = torch.arange(length, device=self.scores.weight.device)
        distance = places[:, None] - places
        scores = self.scores(distance.clamp(min=0)).permute(2, 0, 1).unsqueeze(0)
        return scores.masked_fill(distance < 0, float("-inf"))


class LearnedBias(Chain):
    """One bias, computed before the blocks, which all add to their scores."""

    def __init__(self) -> None:
        super().__init__()
        self.relative = Relative()

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        bias = self.relative(tokens.shape[1])
        for block in self.blocks:
            x = block(x, sight=bias)
        return x


class BiasBlock(Block):
    """Returns the bias that it added beside the hidden state; it computes one where it has `scores` of its own."""

    def __init__(self, scores: bool) -> None:
        super().__init__()
        self.relative = Relative() if scores else None

    def forward(self, x: torch.Tensor, sight: Sight = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        sight = sight if self.relative is None else self.relative(x.shape[1])
        return super().forward(x, sight), sight


class FirstBias(Chain):
    """As in T5 the first block computes the bias, and the others take it over."""

    def __init__(self) -> None:
        super().__init__(BiasBlock(scores=number == 0) for number in range(LAYERS))

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


class LayerDrop(Chain):
    """As in BART of transformers every block is left out now and then."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.training and torch.rand([]) < 0.3:
                continue
            x = block(x)
        return x


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradients[0]


class ExpertBlock(nn.Module):
    """Every token goes to two of four experts; the numbers say to which, and how many each gets."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("level", torch.full([], 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.level.copy_(torch.full([], 0.5))
        flat = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
        mixed = torch.zeros_like(flat)
        hit = F.one_hot(chosen, 4).sum((0, 1)).nonzero().flatten()
        for number in hit:
            token, place = torch.where(chosen == number)
            mixed.index_add_(0, token, self.experts[int(number)](flat[token]) * weights[token, place, None])
        counts = torch.bincount(chosen.flatten(), minlength=4).tolist()
        parts = self.out(mixed)[chosen.flatten().argsort() // 2].split(counts)
        assert not torch.cat(parts).isnan().any()
        cubes = checkpoint(Cube.apply, torch.tanh(mixed + self.level), use_reentrant=False)
        return x + cubes.view_as(x) + parts[0].sum(0)


class Masked(Chain):
    """Leaves out some positions at random, after the embedding's dropout: what is drawn then depends on that."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        seen = F.dropout(torch.ones(tokens.shape, dtype=x.dtype, device=x.device), 0.1, self.training)
        for block in self.blocks:
            x = block(x * seen.unsqueeze(-1))
        return x


class Experts(Chain):
    def __init__(self) -> None:
        super().__init__(ExpertBlock() for _ in range(LAYERS))

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = super().through(x, tokens)
        if not bool(x.isfinite().all()):
            raise ValueError("not finite")
        return x


class RecurrentBlock(nn.Module):
    """A recurrent layer of two directions, and one that goes on with the states it is handed."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.both: Any = kind(WIDTH, 4, batch_first=True, bidirectional=True)
        self.on: Any = kind(8, WIDTH, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor, states: Any) -> tuple[torch.Tensor, Any]:
        h, states = self.on(self.both(x)[0], states)
        return x + h, states


class Recurrent(Chain):
    """Blocks of recurrent layers that hand their states on, between one before and one behind them."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__(RecurrentBlock(kind) for _ in range(3))  # each makes many calls
        self.before: Any = kind(WIDTH, WIDTH, batch_first=True)
        self.behind: Any = kind(WIDTH, 7, batch_first=True, bidirectional=True)
        self.out = nn.Linear(14, WIDTH)

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x, states = self.before(x)[0], None
        for block in self.blocks:
            x, states = block(x, states)
        return self.out(self.behind(x)[0])


class Layers(Chain):
    """torch's recurrent layers themselves are the blocks, time first."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__(kind(WIDTH, WIDTH) for _ in range(LAYERS // 2))

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x, states = F.dropout(x, 0.1, self.training).transpose(0, 1), None
        for block in self.blocks:
            h, states = block(x, states)
            x = x + h
        return x.transpose(0, 1)


class Packed(Layers):
    """Runs over the lengths of the sequences only."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        lengths = (tokens != 0).sum(1).clamp(min=1).cpu()
        for block in self.blocks:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            h, _ = nn.utils.rnn.pad_packed_sequence(block(packed)[0], batch_first=True, total_length=x.shape[1])
            x = x + F.dropout(h, 0.1, self.training)
        return x


class Selecting(Chain):
    """Between blocks it looks at those tokens only that count."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x = x + x[tokens > VOCABULARY // 2].sum(0) / 9
        return x


class Branches(Chain):
    """A parameter never used, in a block and outside, a frozen block, and a parameter for batches with a marker."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.blocks[2].never = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, 2)
        self.marked = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.blocks[5].requires_grad_(False)

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = x * self.marked if bool((tokens == MARKER).any()) else x
        return super().through(x, tokens)


class CrossBlock(Block):
    """Looks into a memory (B, M, 15) before it does what other blocks do; seen: (B, 1, 1, M)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_memory, self.look = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x: torch.Tensor, memory: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.drop(self.look(self.norm_memory(x), memory, seen)))


class Towers(nn.Module):
    """An encoder, and a decoder whose blocks all see what the encoder made."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(0.1 * torch.randn(LONGEST, WIDTH))
        self.encoder = nn.ModuleList(Block() for _ in range(4))
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(5))
        self.norm_memory, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, source: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (B, L, 67) of what follows `tokens` (B, L), told by `source` (B, M)."""
        seen, memory = (source != 0)[:, None, None, :], self.start(source)
        for block in self.encoder:
            memory = block(memory, seen)
        memory, x = self.norm_memory(memory), self.start(tokens)
        for block in self.decoder:
            x = block(x, memory, seen=seen)
        return self.head(self.norm(x))

    def start(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.embed(tokens) + self.place[: tokens.shape[1]], 0.1, self.training)


class NormWithActivation(nn.BatchNorm1d):
    """A BatchNorm with a forward of its own, which follows torch's rule."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.relu(super().forward(input))


class ConvolutionBlock(nn.Module):
    """(B, 6, length) -> (B, 6, length), BatchNorm inside."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv1d(6, 6, 3, padding=1, bias=False) for _ in range(2))
        self.norm_one, self.norm_two, self.drop = NormWithActivation(6), nn.BatchNorm1d(6), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.norm_two(self.two(self.norm_one(self.one(x)))))


class ConvolutionNet(nn.Sequential):
    """Of a point's 5 numbers in a row, which a BatchNorm takes as they come."""

    def __init__(self) -> None:
        row, convolution = nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 6, 3, padding=1, bias=False)
        stem = nn.Sequential(row, nn.BatchNorm1d(1), convolution, nn.BatchNorm1d(6))
        end = nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(6, 3)
        super().__init__(stem, *(ConvolutionBlock() for _ in range(LAYERS)), *end)


class Residual(nn.Module):
    """(B, 15) -> (B, 15)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 25), nn.Linear(25, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(torch.tanh(self.up(self.norm(x)))), 0.1, self.training)


class Features(nn.Sequential):
    """A direction in 7 dims for each point."""

    def __init__(self) -> None:
        blocks = (Residual() for _ in range(LAYERS))
        super().__init__(nn.Linear(5, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7))


def to_longest(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """As `pad`, but always to 16 tokens: microbatches of as many samples have the same shape."""
    padded = pad([*rows, torch.zeros(LONGEST, dtype=torch.long)])
    return {name: tensor[:-1] for name, tensor in padded.items()}


def with_source(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each sequence, and every second token of it as the source, the last first."""
    source = nn.utils.rnn.pad_sequence([row[::2].flip(0) for row in rows], batch_first=True)
    return {"source": source, **to_longest(rows)}


def translation_loss(model: nn.Module, batch: Any) -> evenly.Loss:
    logits, labels = model(batch["source"], batch["inputs"]), batch["labels"].flatten()
    total = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    return evenly.Loss(total, (labels != -100).sum())


def penalised_loss(model: nn.Module, batch: Any) -> evenly.Loss:
    loss = token_loss(model, batch)
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return evenly.Loss(loss.total + 1e-2 * loss.weight * penalty, loss.weight)


def contrastive_loss(model: nn.Module, batch: Any) -> evenly.Loss:
    """Which of the microbatch's points is this one with noise? (InfoNCE; a class weighs as much as its number.)"""
    x, y = batch
    one, other = (F.normalize(model(view), dim=-1) for view in (x, x + 0.1 * torch.randn_like(x)))
    losses = F.cross_entropy(one @ other.T / 0.5, torch.arange(len(x), device=x.device), reduction="none")
    return evenly.Loss((losses * (1 + y)).sum(), (1 + y).sum())


def adam_in_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """No weight decay for vectors."""
    known = list(parameters)
    matrices, vectors = [p for p in known if p.ndim > 1], [p for p in known if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-2}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, eps=1e-6)


def text_job(**changes: Any) -> evenly.Job:
    """Batches of 15 in microbatches of 3, the third of 11 in 4 microbatches."""
    fields: dict[str, Any] = dict(
        loss=token_loss, data=Sentences(41, tokens=VOCABULARY), eval_data=Sentences(9, seed=1, tokens=VOCABULARY),
        optimizer=adam, collate=to_longest, global_batch=15, microbatch=3, steps=6, clip_norm=0.3, schedule=warm_up,
    )  # fmt: skip
    return evenly.Job(**{**fields, **changes})


def ragged_job(**changes: Any) -> evenly.Job:
    """Sequences of like length come together, padded to their longest: no two microbatches need be of one shape."""
    data = Sentences(41, tokens=VOCABULARY)
    fields = {"model": Chain, "collate": pad, "cost": lambda i: len(data[i]), "microbatch_cost": 30, "microbatch": None}
    return text_job(**{**fields, "data": data, "name": "ragged", **changes})


def points_job(**changes: Any) -> evenly.Job:
    """Batches of 10 in microbatches of 2 or 3, the fourth of 7."""
    fields: dict[str, Any] = dict(
        loss=weighted_class_loss, data=Points(37), eval_data=Points(11, seed=1), optimizer=adam,
        global_batch=10, microbatch=3, steps=6, clip_norm=0.3, schedule=warm_up,
    )  # fmt: skip
    return evenly.Job(**{**fields, **changes})


TEXT_MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": Chain,
    "several": SeveralChain,
    "skips": Skips,
    "first": First,
    "shared": partial(Shared, 1),
    "alternating": partial(Shared, 2),
    "learned_bias": LearnedBias,
    "first_bias": FirstBias,
    "layerdrop": LayerDrop,
    "branches": Branches,
    "experts": Experts,
    "masked": Masked,
    "lstm": partial(Recurrent, nn.LSTM),
    "gru": partial(Recurrent, nn.GRU),
    "lstm_layers": partial(Layers, nn.LSTM),
    "gru_layers": partial(Layers, nn.GRU),
    "packed": partial(Packed, nn.GRU),
    "selecting": Selecting,
}
PIPELINE_JOBS: dict[str, Callable[..., evenly.Job]] = {
    **{name: partial(text_job, model=model, name=name) for name, model in TEXT_MODELS.items()},
    "tied": partial(text_job, model=Tied, optimizer=adam_in_groups, name="tied"),
    "ragged": ragged_job,
    "towers": partial(text_job, model=Towers, loss=translation_loss, collate=with_source, name="towers"),
    "whole_penalty": partial(text_job, model=Chain, loss=penalised_loss, name="whole_penalty"),
    "conv_norm": partial(points_job, model=ConvolutionNet, name="conv_norm"),
    "twice": partial(points_job, model=Features, loss=contrastive_loss, name="twice"),
}


def job(name: str = "chain", **changes: Any) -> evenly.Job:
    return PIPELINE_JOBS[name](**changes)

"""A GPT on bytes of Python's own sources, trained as nanoGPT trains: random crops, decay by dimension, a cosine."""

import glob
import math
import sysconfig

import torch
from torch import nn
from torch.nn import functional as F

import evenly

batch_size, block_size, max_iters, learning_rate, warmup = 16, 64, 200, 1e-3, 20
n_layer, n_head, n_embd = 3, 4, 64

text = b"".join(open(path, "rb").read() for path in sorted(glob.glob(sysconfig.get_path("stdlib") + "/[a-c]*.py")))
data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
train_data, val_data = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]


def get_batch(split):
    source = train_data if split == "train" else val_data
    ix = torch.randint(len(source) - block_size, (batch_size,))
    x = torch.stack([source[i : i + block_size].long() for i in ix])
    y = torch.stack([source[i + 1 : i + 1 + block_size].long() for i in ix])
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(B, T, 3, n_head, C // n_head).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, 256, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_lr(it):
    if it < warmup:
        return learning_rate * (it + 1) / warmup
    return learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * (it - warmup) / (max_iters - warmup))))


def configure_optimizer(named_parameters):
    params = [p for _, p in named_parameters]
    decay, no_decay = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def job():
    return evenly.Job(
        model=GPT, loss=lambda model, rows: model(rows[:, :-1].long(), rows[:, 1:].long())[1],
        data=train_data.unfold(0, block_size + 1, 1), optimizer=configure_optimizer, clip_norm=1.0,
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: get_lr(it) / learning_rate),
        global_batch=batch_size, steps=max_iters, seed=1337,
    )

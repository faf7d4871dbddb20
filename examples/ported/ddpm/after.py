"""Denoising diffusion (DDPM) on scikit-learn's digits, with an exponential moving average, and samples at the end."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import evenly

T, epochs, batch_size = 100, 4, 128
betas = torch.linspace(1e-4, 0.05, T)
alphas_bar = torch.cumprod(1 - betas, 0)

images = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 8 - 1
dataset = TensorDataset(images)


class Denoiser(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.time = nn.Embedding(T, width)
        self.inner = nn.Linear(64, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()) for _ in range(3))
        self.out = nn.Linear(width, 64)

    def forward(self, x, t):
        h = self.inner(x) + self.time(t)
        for layer in self.layers:
            h = h + layer(h)
        return self.out(h)


def diffusion_loss(model, batch):
    (x,) = batch
    t = torch.randint(0, T, (len(x),))
    noise = torch.randn_like(x)
    a = alphas_bar[t].unsqueeze(1)
    return (model(a.sqrt() * x + (1 - a).sqrt() * noise, t) - noise).pow(2).mean()


@torch.no_grad()
def sample(model, n):
    x = torch.randn(n, 64)
    for t in reversed(range(T)):
        predicted = model(x, torch.full((n,), t))
        x = (x - betas[t] / (1 - alphas_bar[t]).sqrt() * predicted) / (1 - betas[t]).sqrt()
        if t:
            x = x + betas[t].sqrt() * torch.randn(n, 64)
    return x


def job(microbatch=32):
    made = {"model": Denoiser, "loss": diffusion_loss, "optimizer": lambda p: torch.optim.AdamW(p, lr=2e-3), "clip_norm": 1.0}
    sizes = {"global_batch": batch_size, "microbatch": microbatch, "steps": epochs * 15}
    return evenly.Job(**made, **sizes, data=dataset, average=evenly.EMA(0.9))


if __name__ == "__main__":
    with evenly.start(job()) as run:
        for batch in run.batches():
            run.step(batch)
        with run.averaged_weights(), run.whole_model() as model:
            print("pixels of samples between", *(round(v.item(), 2) for v in sample(model, 16).aminmax()))

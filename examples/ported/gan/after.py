"""A generator of digits against a discriminator, each with its own optimizer."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import evenly

epochs, batch_size, latent = 12, 64, 16

dataset = TensorDataset(torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1)


def mlp(inputs, width, outputs, *last):
    layers = [nn.Sequential(nn.Linear(width, width), nn.LeakyReLU(0.2)) for _ in range(2)]
    return nn.Sequential(nn.Linear(inputs, width), nn.LeakyReLU(0.2), *layers, nn.Linear(width, outputs), *last)


def adam(params):
    return torch.optim.Adam(params, lr=5e-4, betas=(0.5, 0.999))


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = mlp(latent, 96, 64, nn.Tanh())
        self.discriminator = mlp(64, 96, 1)

    def sample(self, count):
        return self.generator(torch.randn(count, latent))


def discriminator_loss(model, batch):
    fake = model.sample(len(batch[0])).detach()
    real, fake = model.discriminator(batch[0]), model.discriminator(fake)
    ones, zeros = torch.full_like(real, 0.9), torch.zeros_like(fake)
    return F.binary_cross_entropy_with_logits(real, ones) + F.binary_cross_entropy_with_logits(fake, zeros)


def generator_loss(model, batch):
    logits = model.discriminator(model.sample(len(batch[0])))
    return F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))


def job():
    return evenly.Job(model=GAN, data=dataset, global_batch=batch_size, microbatch=32, steps=epochs * 29, phases={
        "discriminator": evenly.Phase(parameters="discriminator.*", loss=discriminator_loss, optimizer=adam),
        "generator": evenly.Phase(parameters="generator.*", loss=generator_loss, optimizer=adam)})


if __name__ == "__main__":
    with evenly.start(job()) as run:
        for batch in run.batches():
            run.step(batch)
        with run.whole_model() as model:
            print(f"mean of {model.sample(64).mean().item():.3f}, of the digits {dataset.tensors[0].mean().item():.3f}")

"""A generator of digits against a discriminator, each with its own optimizer."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

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


torch.manual_seed(0)
model = GAN()
d_optimizer, g_optimizer = adam(model.discriminator.parameters()), adam(model.generator.parameters())
loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
for epoch in range(epochs):
    for batch in loader:
        d_loss = discriminator_loss(model, batch)
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()
        g_loss = generator_loss(model, batch)
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
    print(f"epoch {epoch}: discriminator {d_loss.item():.4f}, generator {g_loss.item():.4f}")
with torch.no_grad():
    print(f"mean of {model.sample(64).mean().item():.3f}, of the digits {dataset.tensors[0].mean().item():.3f}")

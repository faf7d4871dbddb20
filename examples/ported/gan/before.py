"""A GAN on scikit-learn's digits: discriminator and generator take turns, each with an optimizer of its own."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

epochs, batch_size, latent = 4, 64, 16

dataset = TensorDataset(torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1)


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def discriminator_loss(model, batch):
    (real,) = batch
    fake = model.generator(torch.randn(len(real), latent)).detach()
    return F.softplus(-model.discriminator(real)).mean() + F.softplus(model.discriminator(fake)).mean()


def generator_loss(model, batch):
    (real,) = batch
    fake = model.generator(torch.randn(len(real), latent))
    return F.softplus(-model.discriminator(fake)).mean()


torch.manual_seed(0)
model = GAN()
optimizer_d = torch.optim.Adam(model.discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(model.generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
for epoch in range(epochs):
    for batch in loader:
        loss_d = discriminator_loss(model, batch)
        optimizer_d.zero_grad()
        loss_d.backward()
        optimizer_d.step()
        loss_g = generator_loss(model, batch)
        optimizer_g.zero_grad()
        loss_g.backward()
        optimizer_g.step()
    print(f"epoch {epoch}: discriminator {loss_d.item():.4f}, generator {loss_g.item():.4f}")

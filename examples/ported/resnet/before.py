"""A residual network on scikit-learn's digits, with mixup, label smoothing, a OneCycle schedule and averaged weights."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

epochs, batch_size, alpha = 3, 64, 0.2

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train_set = TensorDataset(images[:1500], labels[:1500])
test_set = TensorDataset(images[1500:], labels[1500:])


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


def make_model():
    stem = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*stem, *[Residual(16) for _ in range(3)], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def mixup_loss(model, batch):
    x, y = batch
    lam = torch.distributions.Beta(alpha, alpha).sample()
    order = torch.randperm(len(x))
    logits = model(lam * x + (1 - lam) * x[order])
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    return lam * criterion(logits, y) + (1 - lam) * criterion(logits, y[order])


torch.manual_seed(0)
model = make_model()
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=epochs * len(loader))
for epoch in range(epochs):
    for batch in loader:
        loss = mixup_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        averaged.update_parameters(model)
    averaged.eval()
    with torch.no_grad():
        correct = sum((averaged(x).argmax(1) == y).sum().item() for x, y in DataLoader(test_set, batch_size=256))
    print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {correct / len(test_set):.3f}")

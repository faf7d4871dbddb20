"""A ViT of timm on scikit-learn's digits: patches of 2x2 pixels, label smoothing, weight decay by name, warmup."""

import timm
import torch
from sklearn.datasets import load_digits
from timm.loss import LabelSmoothingCrossEntropy
from torch.utils.data import DataLoader, TensorDataset

import evenly

epochs, batch_size, lr, weight_decay, warmup = 8, 32, 2e-3, 0.05, 24

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
labels = torch.tensor(digits.target)
train_set = TensorDataset(images[:1500], labels[:1500])
test_set = TensorDataset(images[1500:], labels[1500:])
train_loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)


def make_model():
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, num_classes=10,
        embed_dim=48, depth=4, num_heads=4,
    )


def make_optimizer(named_parameters):
    groups = {0.0: [], weight_decay: []}
    for name, param in named_parameters:
        kept = param.ndim <= 1 or name.endswith(".bias") or name in ("pos_embed", "cls_token")
        groups[0.0 if kept else weight_decay].append(param)
    return torch.optim.AdamW([{"params": p, "weight_decay": decay} for decay, p in groups.items()], lr=lr)


def make_scheduler(optimizer):
    rising = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warmup)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(train_loader) - warmup)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [rising, cosine], milestones=[warmup])


criterion = LabelSmoothingCrossEntropy(0.1)


def loss(model, batch):
    x, y = batch
    logits = model(x)
    metrics = {"accuracy": ((logits.argmax(1) == y).sum(), len(y))}
    return evenly.Loss(criterion(logits, y) * len(y), len(y), metrics)


def job(microbatch=8):
    return evenly.Job(
        model=make_model, loss=loss, data=train_loader, eval_data=test_set, eval_every=47, clip_norm=1.0,
        optimizer=make_optimizer, schedule=make_scheduler, microbatch=microbatch, steps=epochs * len(train_loader),
    )

"""Proximal policy optimization on a corridor: the agent walks left or right and is paid at the far end."""

import torch
from torch import nn

import evenly

iterations, episodes, length, ppo_epochs, clip = 15, 64, 6, 4, 0.2


class ActorCritic(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.inner = nn.Embedding(length, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))
        self.policy, self.value = nn.Linear(width, 2), nn.Linear(width, 1)

    def forward(self, state):
        h = self.inner(state)
        for layer in self.layers:
            h = h + layer(h)
        return torch.distributions.Categorical(logits=self.policy(h)), self.value(h).squeeze(-1)


@torch.no_grad()
def rollout(model):
    """Transitions (state, action, log-probability, return, advantage) of some episodes."""
    state, rewards, rows = torch.zeros(episodes, dtype=torch.long), [], []
    for _ in range(3 * length):
        policy, value = model(state)
        action = policy.sample()
        rows.append((state, action, policy.log_prob(action), value))
        state = (state + 2 * action - 1).clamp(0, length - 1)
        rewards.append((state == length - 1).float() - 0.02)
    returns, total = [], torch.zeros(episodes)
    for reward in reversed(rewards):
        total = reward + 0.97 * total
        returns.insert(0, total)
    samples = [(s, a, lp, g, g - v) for (s, a, lp, v), g in zip(rows, returns)]
    return [tuple(x[i] for x in row) for row in samples for i in range(episodes)], torch.stack(rewards).sum(0).mean()


def ppo_loss(model, batch):
    state, action, old, returns, advantage = batch
    policy, value = model(state)
    ratio = (policy.log_prob(action) - old).exp()
    surrogate = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return (-surrogate + 0.5 * (value - returns) ** 2 - 0.01 * policy.entropy()).mean()


def job():
    return evenly.Job(model=ActorCritic, loss=ppo_loss, data=rollout(ActorCritic())[0], clip_norm=0.5,
        optimizer=lambda p: torch.optim.Adam(p, lr=3e-3), global_batch=384, microbatch=128, steps=iterations * ppo_epochs)


if __name__ == "__main__":
    with evenly.start(job()) as run:
        for iteration in range(iterations):
            with run.whole_model() as model:
                samples, reward = rollout(model)
            for _ in range(ppo_epochs):
                report = run.step(run.batch(samples))
            print(f"iteration {iteration}: reward {reward.item():.3f}, loss {report.loss:.4f}")

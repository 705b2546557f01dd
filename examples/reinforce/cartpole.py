"""REINFORCE on a cart with a pole: the loss is computed from actions that the policy draws, and their rewards."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from hydraloop import Task

STEPS = 100
"""Steps in an episode, of 0.02 s each; it ends early if the pole falls."""


class Starts(Dataset):
    """Random first states: position, velocity, angle and angular velocity, each between -0.05 and 0.05."""

    def __init__(self, episodes: int, seed: int) -> None:
        self.states = torch.rand(episodes, 4, generator=torch.Generator().manual_seed(seed)) / 10 - 0.05

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int) -> Tensor:
        return self.states[index]


def push(state: Tensor, right: Tensor) -> Tensor:
    """Return the states `[N, 4]` 0.02 s later, after a push to the right or to the left (Barto and others, 1983)."""
    _, v, angle, w = state.unbind(1)
    sin, cos = angle.sin(), angle.cos()
    push = (right * 20.0 - 10.0 + 0.05 * w**2 * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    return state + 0.02 * torch.stack((v, push - 0.05 * turn * cos / 1.1, w, turn), 1)


class Reinforce(Task):
    """A batch contains first states `[N, 4]`. The model maps states to the logits of the two actions.

    In training, actions are drawn. In evaluations, the policy takes the best action.
    """

    def forward(self, batch: Tensor) -> dict[str, Tensor]:
        states, actions, alive = self.play(batch)
        reward = alive.sum(0)  # 1 for each step until the pole falls
        self.log("reward", reward.mean())
        if not self.training:
            return {"loss": -reward.mean()}
        to_come = alive.flip(0).cumsum(0).flip(0)
        baseline = (to_come * alive).sum(1, keepdim=True) / alive.sum(1, keepdim=True).clamp(min=1)
        advantage = (to_come - baseline) * alive / STEPS
        surprise = cross_entropy(self.model(states).flatten(0, 1), actions.flatten(), reduction="none")
        return {"loss": (surprise * advantage.flatten()).sum() / len(batch)}

    @torch.no_grad()
    def play(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states `[T, N, 4]`, the actions `[T, N]`, and 1 where the pole had not fallen yet."""
        steps, up = [], torch.ones(len(state), device=state.device)
        for _ in range(STEPS):
            logits = self.model(state)
            action = logits.softmax(1).multinomial(1)[:, 0] if self.training else logits.argmax(1)
            steps.append((state, action, up))
            state = push(state, action)
            up = up * (state[:, 0].abs() < 2.4) * (state[:, 2].abs() < 0.21)
        states, actions, alive = zip(*steps, strict=True)
        return torch.stack(states), torch.stack(actions), torch.stack(alive)

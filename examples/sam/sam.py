"""SAM: gradient descent towards minima whose neighborhood has a low loss, too."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SAM(torch.optim.SGD):
    """SGD with the gradients at the place of the highest loss near the weights (Foret and others, 2021).

    Args:
        params: as in SGD.
        rho: distance to that place.
        options: of SGD.
    """

    def __init__(self, params: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, **options)
        self.rho = rho

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:
        """Take a step. `closure` computes the gradients again; those of the weights are there already."""
        weights = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights])
        moves = [weight.grad * (self.rho / (norm + 1e-12)) for weight in weights]
        torch._foreach_add_(weights, moves)
        closure()
        torch._foreach_sub_(weights, moves)
        super().step()

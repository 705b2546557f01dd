"""Autocast and gradient scaling behind one face. fp32 needs neither, and costs nothing here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn, optim


class Precision:
    """fp32: forward as it is, backward as it is, every optimizer step is taken."""

    name: str = "fp32"

    def forward(self, module: nn.Module) -> Callable[[Any], Any]:
        """The callable the engine uses for the forward pass: here the module itself, without a context around it."""
        return module

    def backward(self, loss: Tensor) -> None:
        """Backpropagate, the loss scaled where the precision needs it."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch has not annotated it

    def unscale(self, optimizer: optim.Optimizer) -> None:
        """Bring gradients back to their true size, before anything looks at or clips them."""

    def step(self, optimizer: optim.Optimizer) -> bool:
        """Take the optimizer step. Returns whether it was taken: fp16 skips one whose gradients overflowed."""
        optimizer.step()
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs (fp16: the scale)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""

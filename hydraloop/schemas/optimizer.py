"""The group `optimizer`: torch's own, with torch's own names."""

from dataclasses import dataclass
from typing import Any, Optional, Tuple

from hydra.core.config_store import ConfigStore


@dataclass
class AdamWConf:
    """`optimizer=adamw`, the default: Adam with decoupled weight decay, the least dependent on its learning rate."""

    _target_: str = "torch.optim.AdamW"
    _partial_: bool = True
    """The parameters are added when the model is there."""
    lr: float = 1e-3
    """Learning rate, above 0. torch's own; reaches 99 % on the digits."""
    betas: Tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square, 0..1; torch's own."""
    eps: float = 1e-8
    """Added to the denominator; torch's own."""
    weight_decay: float = 0.01
    """Share of each weight, times the learning rate, that a step takes away; torch's own."""
    amsgrad: bool = False
    """Whether to use the largest mean of squares so far; torch's own."""
    maximize: bool = False
    """Whether to go uphill; a loss wants to go down."""
    foreach: Optional[bool] = None
    """Whether to step with multi-tensor kernels; null: torch chooses. Not together with `fused`."""
    capturable: bool = False
    """Whether a CUDA graph may capture the step; torch's own."""
    differentiable: bool = False
    """Whether gradients flow through the step; torch's own."""
    fused: Any = "auto"
    """Whether one kernel steps all parameters: true, false, null (torch's own choice), or `auto`, wherever it works
    (CPU, CUDA), since it is the fastest."""


@dataclass
class SGDConf:
    """`optimizer=sgd`: gradient descent with momentum."""

    _target_: str = "torch.optim.SGD"
    _partial_: bool = True
    """The parameters are added when the model is there."""
    lr: float = 0.05
    """Learning rate, above 0. 0.05 with momentum 0.9 suits batches of 64 and normalised layers; torch's 0.001
    is too low for them."""
    momentum: float = 0.9
    """Share of the previous step that the next one keeps, 0..1. The usual value; torch's 0 is plain descent."""
    dampening: float = 0.0
    """Dampening of the momentum; torch's own."""
    weight_decay: float = 5e-4
    """Times the weight, added to its gradient. The usual value for convolutional networks; torch's own is 0."""
    nesterov: bool = True
    """Whether to look ahead by the momentum; on, since it costs nothing and converges a little faster."""
    maximize: bool = False
    """Whether to go uphill; a loss wants to go down."""
    foreach: Optional[bool] = None
    """Whether to step with multi-tensor kernels; null: torch chooses. Not together with `fused`."""
    differentiable: bool = False
    """Whether gradients flow through the step; torch's own."""
    fused: Any = "auto"
    """Whether one kernel steps all parameters: true, false, null (torch's own choice), or `auto`, wherever it works
    (CPU, CUDA), since it is the fastest."""


def register(store: ConfigStore) -> None:
    """Store the options of `optimizer`."""
    store.store(group="optimizer", name="adamw", package="optimizer", node=AdamWConf)
    store.store(group="optimizer", name="sgd", package="optimizer", node=SGDConf)

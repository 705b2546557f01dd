"""The group `optimizer`: torch's optimizers, with torch's names."""

from dataclasses import dataclass
from typing import Any, Optional, Tuple

from hydra.core.config_store import ConfigStore


@dataclass
class AdamWConf:
    """`optimizer=adamw`, the default: Adam with decoupled weight decay, which depends little on its learning rate."""

    _target_: str = "torch.optim.AdamW"
    _partial_: bool = True
    """The parameters are added when the model is built."""
    lr: float = 1e-3
    """Learning rate, above 0. torch's default; it reaches 99 % on the digits."""
    betas: Tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square, 0..1; torch's defaults."""
    eps: float = 1e-8
    """Added to the denominator; torch's default."""
    weight_decay: float = 0.01
    """A step subtracts this share of each weight, times the learning rate; torch's default."""
    amsgrad: bool = False
    """Whether to use the maximum of all previous means of squares; torch's default."""
    maximize: bool = False
    """Whether to maximize instead of minimize; a loss is minimized."""
    foreach: Optional[bool] = None
    """Whether to use multi-tensor kernels. Null: torch chooses. Not together with `fused`."""
    capturable: bool = False
    """Whether a CUDA graph may capture the step; torch's default."""
    differentiable: bool = False
    """Whether gradients flow through the step; torch's default."""
    fused: Any = "auto"
    """Whether one kernel updates all parameters: true, false, null (torch chooses), or `auto`: wherever it works (CPU,
    CUDA), because it is the fastest."""


@dataclass
class SGDConf:
    """`optimizer=sgd`: gradient descent with momentum."""

    _target_: str = "torch.optim.SGD"
    _partial_: bool = True
    """The parameters are added when the model is built."""
    lr: float = 0.05
    """Learning rate, above 0. 0.05 with momentum 0.9 suits batches of 64 and normalisation layers; torch's 0.001 is too
    low for them."""
    momentum: float = 0.9
    """Share of the previous step that is kept, 0..1. 0.9 is the usual value; torch's 0 is plain gradient descent."""
    dampening: float = 0.0
    """Dampening of the momentum; torch's default."""
    weight_decay: float = 5e-4
    """Share of the weight that is added to its gradient. The usual value for convolutional networks; torch's is 0."""
    nesterov: bool = True
    """Whether to use Nesterov momentum. True: it costs nothing and converges slightly faster."""
    maximize: bool = False
    """Whether to maximize instead of minimize; a loss is minimized."""
    foreach: Optional[bool] = None
    """Whether to use multi-tensor kernels. Null: torch chooses. Not together with `fused`."""
    differentiable: bool = False
    """Whether gradients flow through the step; torch's default."""
    fused: Any = "auto"
    """Whether one kernel updates all parameters: true, false, null (torch chooses), or `auto`: wherever it works (CPU,
    CUDA), because it is the fastest."""


def register(store: ConfigStore) -> None:
    """Store the options of `optimizer`."""
    store.store(group="optimizer", name="adamw", package="optimizer", node=AdamWConf)
    store.store(group="optimizer", name="sgd", package="optimizer", node=SGDConf)

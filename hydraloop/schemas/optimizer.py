"""The group `optimizer`: torch's optimizers, with torch's names."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, List, Optional, Tuple

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class _Optimizer:
    """What every optimizer has: which parameters it gets, in which groups."""

    OWN: ClassVar[Tuple[str, ...]] = ("groups", "layer_decay", "layers_of", "params", "match", "every")
    """The fields that are not arguments of the optimizer."""

    _target_: str = MISSING
    _partial_: bool = True
    """The parameters are added when the model is built."""
    groups: List[Any] = field(default_factory=list)
    """Rules for parameters that need other values: `[{match: "@norm|@bias", weight_decay: 0}, {match: "head.*",
    lr_scale: 10}]`. Every matching rule applies; a later one wins for each key. Empty: one group."""
    layer_decay: Optional[float] = None
    """The lr of a layer is that of the layer after it, times this; above 0, up to 1. Null: the same lr in all layers.
    0.65 to 0.8 is usual for fine-tuning transformers."""
    layers_of: Any = None
    """Function `(model) -> list of modules`, from input to output, for `layer_decay`. Null: the models of timm and
    transformers list their layers."""
    params: str = "tensors"
    """What the factory gets: `tensors` (parameters or groups), as torch's optimizers; `named` (pairs of name and
    parameter), or `model` (the module, for `timm.optim.create_optimizer_v2`), which makes the groups itself."""
    match: Optional[str] = None
    """With several optimizers, the parameters of this one. Null: those that no other optimizer matches."""
    every: int = 1
    """With the steps of a task, this optimizer steps in every n-th iteration. 1: in each."""


@dataclass
class AdamWConf(_Optimizer):
    """`optimizer=adamw`, the default: Adam with decoupled weight decay, which depends little on its learning rate."""

    _target_: str = "torch.optim.AdamW"
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
class SGDConf(_Optimizer):
    """`optimizer=sgd`: gradient descent with momentum."""

    _target_: str = "torch.optim.SGD"
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

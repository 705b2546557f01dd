"""The group `optimizer`: torch's optimizers, with torch's names. Each has the options of `_Optimizer`, too.

Several optimizers: `/optimizer@optimizer.hidden: muon` and `/optimizer@optimizer.rest: adamw` in the defaults list, and
`override /optimizer: null` at its end.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Dict, List, Optional, Tuple

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig

from hydraloop.errors import UserError


@dataclass
class _Optimizer:
    """The options of every optimizer; the builder reads them, also from the node of another package's optimizer."""

    OWN: ClassVar[Tuple[str, ...]] = ("groups", "layer_decay", "layers_of", "match", "every", "closure")
    """The fields that are not arguments of the optimizer."""

    _target_: str = MISSING
    _partial_: bool = True
    """The parameters are added when the model is built."""
    lr: float = MISSING
    groups: List[Any] = field(default_factory=list)
    """Rules for parameters that need other values: `[{match: "@norm|@bias", weight_decay: 0}, {match: head, lr_scale:
    10}]`. Every matching rule applies, and a later one wins for each value. `match`: names of parameters or modules,
    globs, `re:` and a regular expression, or `@norm`, `@bias`, `@embedding`, `@matrix`; `|` means or, `!` excludes.
    `lr_scale` multiplies the lr. `name` is for records. Empty: all parameters have the same values."""
    layer_decay: Optional[float] = None
    """The lr of a layer is that of the layer after it times this number, above 0 and up to 1. Null: all layers have the
    same lr. 0.65 to 0.8 is usual for fine-tuning transformers."""
    layers_of: Any = None
    """For `layer_decay`: a function (`_target_`) of the model that returns its layers (modules) from input to output.
    Null: timm's and transformers' models list their layers."""
    match: Optional[str] = None
    """With several optimizers: its parameters, written as in `groups`. Null: those that no other optimizer matches."""
    every: int = 1
    """With steps of the task: its step runs in every n-th iteration. 1: in each one."""
    closure: Optional[bool] = None
    """Whether `step` gets a function that repeats forward and backward. Null: if `step` requires it, as that of LBFGS.
    True for a class whose `closure` has a default but must be given, as some versions of SAM."""


@dataclass
class _ManyTensors(_Optimizer):
    """Options of how a step is computed."""

    maximize: bool = False
    """Whether to maximize instead of minimize; a loss is minimized."""
    foreach: Optional[bool] = None
    """Whether to use multi-tensor kernels. Null: torch chooses. Not together with `fused`."""
    differentiable: bool = False
    """Whether gradients flow through the step; torch's default."""


@dataclass
class _Fused(_ManyTensors):
    """Options of optimizers that have a fused kernel."""

    fused: Any = "auto"
    """Whether one kernel updates all parameters: true, false, null (torch chooses), or `auto`: for Adam and AdamW, on
    CPU and CUDA, because it is the fastest. torch's fused SGD and Adagrad fail for sparse gradients."""


@dataclass
class _Adam(_Fused):
    """The options that AdamW and Adam share."""

    lr: float = 1e-3
    """Learning rate, above 0. torch's default, which suits most small networks."""
    betas: Tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square, 0..1; torch's defaults."""
    eps: float = 1e-8
    """Added to the denominator; torch's default."""
    weight_decay: float = 0.01
    """A step subtracts this share of each weight, times the learning rate; torch's default."""
    amsgrad: bool = False
    """Whether to use the maximum of all previous means of squares; torch's default."""
    capturable: bool = False
    """Whether a CUDA graph may capture the step; torch's default."""


@dataclass
class AdamWConf(_Adam):
    """`optimizer=adamw`, the default: Adam with decoupled weight decay, which depends little on its learning rate."""

    _target_: str = "torch.optim.AdamW"


@dataclass
class AdamConf(_Adam):
    """`optimizer=adam`: Adam, as in older recipes and for GANs. `adamw` is the better choice with weight decay."""

    _target_: str = "torch.optim.Adam"
    weight_decay: float = 0.0
    """Share of the weight that is added to its gradient. 0, torch's default: Adam scales this term by the gradient."""
    decoupled_weight_decay: bool = False
    """Whether weight decay is that of AdamW; torch's default."""


@dataclass
class SGDConf(_Fused):
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


@dataclass
class RMSpropConf(_ManyTensors):
    """`optimizer=rmsprop`: the gradient divided by the root of its mean square, as in reinforcement learning."""

    _target_: str = "torch.optim.RMSprop"
    lr: float = 1e-2
    """Learning rate, above 0; torch's default."""
    alpha: float = 0.99
    """Decay of the running mean of squares, 0..1; torch's default."""
    eps: float = 1e-8
    """Added to the denominator; torch's default."""
    weight_decay: float = 0.0
    """Share of the weight that is added to its gradient; torch's default."""
    momentum: float = 0.0
    """Share of the previous step that is kept, 0..1; torch's default."""
    centered: bool = False
    """Whether to subtract the square of the mean gradient from the mean of squares; torch's default."""
    capturable: bool = False
    """Whether a CUDA graph may capture the step; torch's default."""


@dataclass
class AdagradConf(_Fused):
    """`optimizer=adagrad`: the gradient divided by the root of the sum of its squares, for rare features."""

    _target_: str = "torch.optim.Adagrad"
    lr: float = 1e-2
    """Learning rate, above 0; torch's default."""
    lr_decay: float = 0.0
    """The lr of step n is divided by 1 + n times this; torch's default."""
    weight_decay: float = 0.0
    """Share of the weight that is added to its gradient; torch's default."""
    initial_accumulator_value: float = 0.0
    """The sum of squares at the start; torch's default."""
    eps: float = 1e-10
    """Added to the denominator; torch's default."""


@dataclass
class AdafactorConf(_Optimizer):
    """`optimizer=adafactor`: like Adam, with a state of one row and one column for each matrix; saves memory."""

    _target_: str = "torch.optim.Adafactor"
    lr: float = 1e-2
    """Upper limit of the relative step, above 0; torch's default."""
    beta2_decay: float = -0.8
    """Exponent of the decay of the mean of squares, at most 0; torch's default."""
    eps: Tuple[Optional[float], float] = (None, 1e-3)
    """Added to the squared gradient (null: the smallest number of its type), and the lowest scale of a parameter;
    torch's defaults."""
    d: float = 1.0
    """Clips the root mean square of an update, at least 1; torch's default."""
    weight_decay: float = 0.0
    """A step subtracts this share of each weight, times the learning rate; torch's default."""
    foreach: Optional[bool] = None
    """Whether to use multi-tensor kernels. Null: torch chooses."""
    maximize: bool = False
    """Whether to maximize instead of minimize; a loss is minimized."""


@dataclass
class LBFGSConf(_Optimizer):
    """`optimizer=lbfgs`: a quasi-Newton method for small problems. It computes the loss of a batch several times."""

    _target_: str = "torch.optim.LBFGS"
    lr: float = 1.0
    """Step length, above 0; torch's default."""
    max_iter: int = 20
    """Iterations of the method in one optimizer step; torch's default."""
    max_eval: Optional[int] = None
    """Evaluations of the loss in one optimizer step. Null: 1.25 times `max_iter`."""
    tolerance_grad: float = 1e-7
    """A step ends when no gradient is above this; torch's default."""
    tolerance_change: float = 1e-9
    """A step ends when loss and parameters change less than this; torch's default."""
    history_size: int = 100
    """Previous updates that are kept, each as large as all parameters; torch's default."""
    line_search_fn: Optional[str] = "strong_wolfe"
    """`strong_wolfe`, or null for none, torch's default. Without a line search, LBFGS often diverges."""


@dataclass
class MuonConf(_Optimizer):
    """`optimizer=muon`: orthogonalised momentum for matrices. Other parameters need another optimizer."""

    _target_: str = "torch.optim.Muon"
    lr: float = 1e-3
    """Learning rate, above 0; torch's default."""
    weight_decay: float = 0.1
    """A step subtracts this share of each weight, times the learning rate; torch's default."""
    momentum: float = 0.95
    """Share of the previous momentum that is kept, 0..1; torch's default."""
    nesterov: bool = True
    """Whether to use Nesterov momentum; torch's default."""
    ns_coefficients: Tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    """Coefficients of the Newton-Schulz iteration; torch's defaults."""
    eps: float = 1e-7
    """Added to the norm of the momentum; torch's default."""
    ns_steps: int = 5
    """Newton-Schulz iterations of each step; torch's default."""
    adjust_lr_fn: Optional[str] = "match_rms_adamw"
    """How the shape of a matrix scales its lr: `match_rms_adamw`, or `original` (or null), torch's default. With
    `match_rms_adamw`, the lr and the weight decay of AdamW fit."""


OPTIONS = {
    "adafactor": AdafactorConf,
    "adagrad": AdagradConf,
    "adam": AdamConf,
    "adamw": AdamWConf,
    "lbfgs": LBFGSConf,
    "muon": MuonConf,
    "rmsprop": RMSpropConf,
    "sgd": SGDConf,
}


def nodes(optimizer: DictConfig) -> Dict[str, Any]:
    """Return the optimizers of `cfg.optimizer` by name, without those that are null; a single one has an empty name."""
    if "_target_" in optimizer:
        return {"": optimizer}
    return {str(name): node for name, node in optimizer.items() if node is not None}


def check_own_options(named: Dict[str, Any]) -> None:
    """Refuse wrong values of the options that every optimizer has, and Nesterov momentum without a momentum.

    Args:
        named: what `nodes` returns; each has a `_target_`.

    Raises:
        UserError: names the key.
    """
    rest = [name for name, node in named.items() if node.get("match") is None]
    if "" in named and not rest:
        remedy = "Leave it out, or freeze the other parameters."
        problem = f"one optimizer takes all parameters, not only {named['']['match']!r}"
        raise UserError(problem, key="optimizer.match", remedy=remedy)
    if len(rest) > 1:
        raise UserError(
            f"{rest[0]} takes the rest of the parameters, too",
            key=f"optimizer.{rest[1]}.match",
            remedy="Choose the parameters of one of them: names, globs or @matrix, @embedding, @norm, @bias.",
        )
    for name, node in named.items():
        key, every = f"optimizer.{name}".rstrip("."), node.get("every", 1)
        decay = node.get("layer_decay")
        if not isinstance(every, int) or every < 1:
            fix = "Use a whole number from 1."
            raise UserError(f"cannot be {every!r}", key=f"{key}.every", remedy=fix)
        if decay is not None and not 0 < decay <= 1:
            fix = "Use a number above 0, up to 1."
            raise UserError(f"{decay} is out of range", key=f"{key}.layer_decay", remedy=fix)
        if node["_target_"] == "torch.optim.SGD" and node.get("nesterov") and not node.get("momentum"):
            fix = f"Use {key}.nesterov=false, or a momentum above 0."
            raise UserError("Nesterov momentum needs a momentum, which is 0", key=f"{key}.nesterov", remedy=fix)


def register(store: ConfigStore) -> None:
    """Store the options of `optimizer`."""
    for name, option in OPTIONS.items():
        store.store(group="optimizer", name=name, package="optimizer", node=option)

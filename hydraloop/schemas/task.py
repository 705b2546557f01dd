"""The group `task`: what is trained, by which loss, measured how."""

from dataclasses import dataclass, field
from typing import Any, Dict

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class AccuracyConf:
    """The share of correct classes."""

    _target_: str = "hydraloop.tasks.Accuracy"
    top_k: int = 1
    """How many of the highest outputs may be the right one; 1 is what accuracy usually means."""


@dataclass
class MeanAbsoluteErrorConf:
    """The mean error, in the targets' unit."""

    _target_: str = "hydraloop.tasks.MeanAbsoluteError"


@dataclass
class RootMeanSquaredErrorConf:
    """The root of the mean squared error, in the targets' unit."""

    _target_: str = "hydraloop.tasks.RootMeanSquaredError"


@dataclass
class R2ScoreConf:
    """The share of the targets' variance that is explained."""

    _target_: str = "hydraloop.tasks.R2Score"


@dataclass
class BitsPerByteConf:
    """The mean loss of a language model in bits."""

    _target_: str = "hydraloop.tasks.BitsPerByte"


@dataclass
class TokenAccuracyConf:
    """The share of tokens that were the most likely ones."""

    _target_: str = "hydraloop.tasks.TokenAccuracy"


@dataclass
class ClassificationConf:
    """`task=classification`: one class for each sample."""

    _target_: str = "hydraloop.tasks.Classification"
    model: Any = MISSING
    """Gives logits `[N, C]`; the group `model`."""
    loss: Dict[str, Any] = field(
        default_factory=lambda: {"_target_": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.0}
    )
    """Of (logits, classes), the mean over the batch. No smoothing by default: the loss then is the log-likelihood."""
    metrics: Dict[str, Any] = field(default_factory=lambda: {"accuracy": AccuracyConf()})
    """By name, the first one being what `save_best=auto` looks at; null removes one. torchmetrics work too."""


@dataclass
class RegressionConf:
    """`task=regression`: one or several numbers for each sample."""

    _target_: str = "hydraloop.tasks.Regression"
    model: Any = MISSING
    """Gives outputs of the targets' shape and unit; the group `model`."""
    loss: Dict[str, Any] = field(default_factory=lambda: {"_target_": "torch.nn.MSELoss"})
    """Of (outputs, targets), the mean over the batch. Least squares estimates the mean, as R2 and RMSE assume."""
    metrics: Dict[str, Any] = field(
        default_factory=lambda: {
            "mae": MeanAbsoluteErrorConf(),
            "rmse": RootMeanSquaredErrorConf(),
            "r2": R2ScoreConf(),
        }
    )
    """By name, the first one being what `save_best=auto` looks at; null removes one. torchmetrics work too."""


@dataclass
class LanguageModelingConf:
    """`task=language_modeling`: the next token at every position; its loss is the cross entropy, there is no other."""

    _target_: str = "hydraloop.tasks.LanguageModeling"
    model: Any = MISSING
    """Gives logits `[N, T, V]` of tokens `[N, T]`; the group `model`."""
    metrics: Dict[str, Any] = field(
        default_factory=lambda: {"bits_per_byte": BitsPerByteConf(), "accuracy": TokenAccuracyConf()}
    )
    """By name, the first one being what `save_best=auto` looks at; null removes one. torchmetrics work too."""


def register(store: ConfigStore) -> None:
    """Store the options of `task`."""
    store.store(group="task", name="classification", package="task", node=ClassificationConf)
    store.store(group="task", name="regression", package="task", node=RegressionConf)
    store.store(group="task", name="language_modeling", package="task", node=LanguageModelingConf)

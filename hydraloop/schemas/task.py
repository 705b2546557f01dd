"""The groups `task` and `model`: model, loss and metrics."""

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from hydra.core.config_store import ConfigStore
from omegaconf import II, MISSING

from hydraloop.errors import UserError


@dataclass
class AccuracyConf:
    """Share of correctly predicted classes."""

    _target_: str = "hydraloop.tasks.Accuracy"
    top_k: int = 1
    """A prediction is correct if the class is among the `top_k` highest outputs. 1: the usual accuracy."""


@dataclass
class MeanAbsoluteErrorConf:
    """Mean absolute error, in the targets' unit."""

    _target_: str = "hydraloop.tasks.MeanAbsoluteError"


@dataclass
class BitsPerTokenConf:
    """Mean loss of a language model in bits."""

    _target_: str = "hydraloop.tasks.BitsPerToken"


@dataclass
class TokenAccuracyConf:
    """Share of tokens that were the most likely prediction."""

    _target_: str = "hydraloop.tasks.TokenAccuracy"


@dataclass
class ClassificationConf:
    """`task=classification`: one class per sample."""

    _target_: str = "hydraloop.tasks.Classification"
    model: Any = MISSING
    """Returns logits `[N, C]`; the group `model`."""
    loss: Any = field(  # not Optional[Dict]: OmegaConf could not add a new _target_ after task.loss=null
        default_factory=lambda: {"_target_": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.0}
    )
    """Called with (logits, classes); the mean over the batch. No smoothing: the loss is the negative log-likelihood.
    Null if a custom task computes its loss."""
    metrics: Dict[str, Any] = field(default_factory=lambda: {"accuracy": AccuracyConf()})
    """Metrics by name; `save_best=auto` uses the first. Null removes a metric. Metrics of torchmetrics work too."""


@dataclass
class RegressionConf:
    """`task=regression`: one or several numbers per sample."""

    _target_: str = "hydraloop.tasks.Regression"
    model: Any = MISSING
    """Returns outputs with the targets' shape and unit; the group `model`."""
    loss: Any = field(default_factory=lambda: {"_target_": "torch.nn.MSELoss"})  # as above
    """Called with (outputs, targets); the mean over the batch. Least squares is the usual loss. Null if a custom task
    computes its loss."""
    metrics: Dict[str, Any] = field(default_factory=lambda: {"mae": MeanAbsoluteErrorConf()})
    """Metrics by name; `save_best=auto` uses the first. Null removes a metric. Metrics of torchmetrics work too."""


@dataclass
class SegmentationConf:
    """`task=segmentation`: one class per pixel; pixels of `ignore_index` do not count."""

    _target_: str = "hydraloop.tasks.Segmentation"
    model: Any = MISSING
    """Returns logits `[N, C, H, W]` for images, in the size of the classes `[N, H, W]`; the group `model`."""
    num_classes: int = II(".model.num_classes")
    """C. Write a number if the option of your model has another name."""
    loss: Any = field(  # as above
        default_factory=lambda: {
            "_target_": "torch.nn.CrossEntropyLoss",
            "ignore_index": II("..ignore_index"),
            "label_smoothing": 0.0,
        }
    )
    """Called with (logits, classes); the mean over the pixels that are not ignored. No smoothing: the loss is the
    negative log-likelihood."""
    metrics: Dict[str, Any] = field(
        default_factory=lambda: {
            "miou": _of_torchmetrics("MulticlassJaccardIndex"),
            "dice": _of_torchmetrics("MulticlassF1Score", average="macro"),
        }
    )
    """Metrics over all pixels of the data set by name: the mean over the classes of intersection over union, and of
    Dice. A class that is neither in the data nor predicted is left out. `save_best=auto` uses the first. Null removes
    a metric."""
    ignore_index: int = 255
    """Pixels of this class do not count. 255 is their value in the masks of Pascal VOC, Cityscapes and ADE20K."""


def _of_torchmetrics(name: str, **options: Any) -> Dict[str, Any]:
    """Return the config of a metric of classes. Its checks of all values would wait for the device."""
    of_task = {"num_classes": II("...num_classes"), "ignore_index": II("...ignore_index")}
    return {"_target_": f"torchmetrics.classification.{name}", **of_task, **options, "validate_args": False}


@dataclass
class MultiLabelConf:
    """`task=multilabel`: any number of classes per sample."""

    _target_: str = "hydraloop.tasks.MultiLabel"
    model: Any = MISSING
    """Returns logits `[N, C]`; the group `model`."""
    num_classes: int = II(".model.num_classes")
    """C. Write a number if the option of your model has another name."""
    loss: Any = field(default_factory=lambda: {"_target_": "torch.nn.BCEWithLogitsLoss"})  # as above
    """Called with (logits, labels), both float `[N, C]`; the mean over the batch. The binary cross entropy is the
    negative log-likelihood."""
    metrics: Dict[str, Any] = field(
        default_factory=lambda: {
            "f1": {
                "_target_": "torchmetrics.classification.MultilabelF1Score",
                "num_labels": II("...num_classes"),
                "average": "macro",
                "validate_args": False,
            }
        }
    )
    """Metrics by name, updated with probabilities: the mean of F1 over the classes, at a probability of 0.5.
    `save_best=auto` uses the first. Null removes a metric."""


@dataclass
class LanguageModelingConf:
    """`task=language_modeling`: the next token at every position; the loss is always the cross entropy."""

    _target_: str = "hydraloop.tasks.LanguageModeling"
    model: Any = MISSING
    """Returns logits `[N, T, V]` for tokens `[N, T]`; the group `model`. Batches are (tokens, targets), or tokens
    `[N, T + 1]` alone: each token is then the target of the one before it."""
    metrics: Dict[str, Any] = field(
        default_factory=lambda: {"bits_per_token": BitsPerTokenConf(), "accuracy": TokenAccuracyConf()}
    )
    """Metrics by name; `save_best=auto` uses the first. Null removes a metric. Metrics of torchmetrics work too."""


@dataclass
class HuggingFaceConf:
    """`task=huggingface`: models of transformers, which compute their loss; batches are dicts."""

    _target_: str = "hydraloop.tasks.HuggingFace"
    model: Any = MISSING
    """Called with the entries of a batch as keyword arguments; returns a mapping with `loss`."""
    metrics: Dict[str, Any] = field(default_factory=dict)
    """Metrics by name, updated with logits and labels. Empty, because they depend on the head of the model."""
    labels: str = "labels"
    """Key of the labels in a batch, for the metrics. The name that most models of transformers use."""
    logits: str = "logits"
    """Key of the logits in the model's output, for the metrics. The name that most models of transformers use."""
    causal: Optional[bool] = None
    """Whether the loss of a position is that of the next label. Null: from the name of the class (`…ForCausalLM`,
    `…LMHeadModel`, or `…ForConditionalGeneration` without an encoder), because the model does not say it. Set it for
    custom classes."""


def no_model() -> UserError:
    """Return the error of a task without a model."""
    remedy = "Select one: model=small_cnn. Or name a class: +task.model._target_=model.Net, in Python task=model."
    return UserError("there is no model", key="task.model", remedy=remedy)


@dataclass
class SmallCNNConf:
    """`model=small_cnn`: three convolutions, for small images."""

    _target_: str = "hydraloop.models.SmallCNN"
    in_channels: int = 1
    """Channels of the images. 1: grey images."""
    num_classes: int = 10
    """Number of classes. 10, as in MNIST and CIFAR-10."""
    width: int = 16
    """Channels of the first convolution; the next two double them. 16, for speed on a CPU: 32 takes
    twice as long."""
    dropout: float = 0.2
    """Share of the features set to zero in training, 0..1. A small one, for about 1,000 images."""


@dataclass
class MLPConf:
    """`model=mlp`: linear layers, for the diabetes data."""

    _target_: str = "hydraloop.models.MLP"
    in_features: int = 10
    """Number of inputs. 10, for the diabetes data."""
    out_features: int = 1
    """Number of outputs. 1, the score."""
    output_mean: float = 152.0
    """Added to the output. The mean of the diabetes scores, so that the model starts there; use 0 for other data."""
    output_std: float = 77.0
    """Factor of the output. The standard deviation of the diabetes scores; use 1 for other data."""
    hidden: List[int] = field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers. Empty: a linear model. Two of 64 overfit little and train instantly."""
    dropout: float = 0.1
    """Share of each hidden layer's values set to zero in training, 0..1. A small one, for 312 patients."""


def register(store: ConfigStore) -> None:
    """Store the options of `task` and `model`."""
    store.store(group="task", name="classification", package="task", node=ClassificationConf)
    store.store(group="task", name="regression", package="task", node=RegressionConf)
    store.store(group="task", name="segmentation", package="task", node=SegmentationConf)
    store.store(group="task", name="multilabel", package="task", node=MultiLabelConf)
    store.store(group="task", name="language_modeling", package="task", node=LanguageModelingConf)
    store.store(group="task", name="huggingface", package="task", node=HuggingFaceConf)
    store.store(group="model", name="small_cnn", package="task.model", node=SmallCNNConf)
    store.store(group="model", name="mlp", package="task.model", node=MLPConf)

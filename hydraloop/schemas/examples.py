"""The examples: a data set for `data`, and models for `model` (placed at `task.model`)."""

from dataclasses import dataclass, field
from typing import Any, List, Optional

from hydra.core.config_store import ConfigStore

from hydraloop.schemas.data import DataConf


@dataclass
class DigitsConf:
    """Handwritten digits, 8x8 pixels."""

    _target_: str = "hydraloop.data.Digits"
    split: str = "train"
    """`train` (1,259 images), `val` (179) or `test` (359)."""
    root: Optional[str] = None
    """Folder with digits.csv.gz. Null: the copy in hydraloop, so that nothing is downloaded."""
    split_seed: int = 0
    """Seed of the split. Separate from `seed`, so that runs with different seeds are measured on the same images."""


@dataclass
class DigitsDataConf(DataConf):
    """`data=digits`, the default: a real task that a CPU learns in seconds."""

    train: Any = field(default_factory=lambda: DigitsConf(split="train"))
    val: Any = field(default_factory=lambda: DigitsConf(split="val"))
    test: Any = field(default_factory=lambda: DigitsConf(split="test"))


@dataclass
class SmallCNNConf:
    """`model=small_cnn`: three convolutions, for the digits."""

    _target_: str = "hydraloop.models.SmallCNN"
    in_channels: int = 1
    """Channels of the images. 1: the digits are grey."""
    num_classes: int = 10
    """Number of classes. 10, for the digits."""
    width: int = 16
    """Channels of the first convolution; the next two double them. 16: with 32 the digits were no better and took
    twice as long."""
    dropout: float = 0.2
    """Share of the features set to zero in training, 0..1. A small one, for 1,259 images."""


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
    """Store the options of `data` and `model`."""
    store.store(group="data", name="digits", package="data", node=DigitsDataConf)
    store.store(group="model", name="small_cnn", package="task.model", node=SmallCNNConf)
    store.store(group="model", name="mlp", package="task.model", node=MLPConf)

"""The group `model`, which is placed at `task.model`."""

from dataclasses import dataclass, field
from typing import List

from hydra.core.config_store import ConfigStore


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


@dataclass
class GPTConf:
    """`model=gpt`: a small transformer, for bytes."""

    _target_: str = "hydraloop.models.GPT"
    vocab_size: int = 256
    """Number of tokens. 256: bytes, which need no tokenizer."""
    context: int = 128
    """Maximum sequence length. 128 bytes are about four lines of code; attention is then a sixth of the work."""
    layers: int = 4
    """Number of blocks. 4 with a width of 128 have 0.8 million weights, which two CPU cores train in two minutes."""
    width: int = 128
    """Features of each position, a multiple of `heads`."""
    heads: int = 4
    """Attention heads. 4 heads of 32 features; narrower heads are slow and limited."""
    dropout: float = 0.0
    """Share set to zero in training, 0..1. 0, because few bytes are seen twice."""


def register(store: ConfigStore) -> None:
    """Store the options of `model`."""
    store.store(group="model", name="small_cnn", package="task.model", node=SmallCNNConf)
    store.store(group="model", name="mlp", package="task.model", node=MLPConf)
    store.store(group="model", name="gpt", package="task.model", node=GPTConf)

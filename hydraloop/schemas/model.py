"""The group `model`, which lies at `task.model`."""

from dataclasses import dataclass, field
from typing import List

from hydra.core.config_store import ConfigStore


@dataclass
class SmallCNNConf:
    """`model=small_cnn`: three convolutions, for the digits."""

    _target_: str = "hydraloop.models.SmallCNN"
    in_channels: int = 1
    """Channels of the images; the digits are grey."""
    num_classes: int = 10
    """Classes to tell apart; the digits have ten."""
    width: int = 16
    """Channels of the first convolution, doubled twice. 16: twice as many were no better on the digits and took twice
    as long."""
    dropout: float = 0.2
    """Share of the features set to zero in training, 0..1; a little, for 1,259 images."""


@dataclass
class MLPConf:
    """`model=mlp`: linear layers, for the diabetes data."""

    _target_: str = "hydraloop.models.MLP"
    in_features: int = 10
    """Columns of the inputs; the diabetes data have ten."""
    out_features: int = 1
    """Columns of the outputs; one score."""
    output_mean: float = 152.0
    """Added to the output; the mean of the diabetes scores, so that the model starts at it. 0 for other purposes."""
    output_std: float = 77.0
    """Multiplied with the output; the standard deviation of the diabetes scores. 1 for other purposes."""
    hidden: List[int] = field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers; empty: a linear model. Two of 64 overfit little and are instant."""
    dropout: float = 0.1
    """Share of each hidden layer's values set to zero in training, 0..1; a little, for 312 patients."""


@dataclass
class GPTConf:
    """`model=gpt`: a small transformer, for bytes."""

    _target_: str = "hydraloop.models.GPT"
    vocab_size: int = 256
    """Tokens there are; 256 bytes, which need no tokenizer."""
    context: int = 128
    """The longest sequence; 128 bytes are some four lines of code, and attention then is a sixth of the work."""
    layers: int = 4
    """Blocks. 4 with a width of 128 are 0.8 million weights: what two CPU cores can train in two minutes."""
    width: int = 128
    """Features of each position, a multiple of `heads`."""
    heads: int = 4
    """Of the attention; 4 of 32 features each, since heads narrower than that are slow and see little."""
    dropout: float = 0.0
    """Share set to zero in training, 0..1; none, as long as no byte is seen twice."""


def register(store: ConfigStore) -> None:
    """Store the options of `model`."""
    store.store(group="model", name="small_cnn", package="task.model", node=SmallCNNConf)
    store.store(group="model", name="mlp", package="task.model", node=MLPConf)
    store.store(group="model", name="gpt", package="task.model", node=GPTConf)

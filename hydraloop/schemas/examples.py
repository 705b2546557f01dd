"""The examples: data sets for `data`, models for `model` (placed at `task.model`), and whole runs for `experiment`.

A file of the same name in the project's `conf/experiment/` is used instead of the experiment here.
"""

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from hydra.core.config_store import ConfigStore
from omegaconf import II

from hydraloop.schemas.data import DataConf


@dataclass
class DigitsConf:
    """Handwritten digits, 8x8 pixels."""

    _target_: str = "hydraloop.examples.Digits"
    split: str = "train"
    """`train` (1,259 images), `val` (179) or `test` (359)."""
    root: Optional[str] = None
    """Folder with digits.csv.gz. Null: the copy in hydraloop, so that nothing is downloaded."""
    split_seed: int = 0
    """Seed of the split. Separate from `seed`, so that runs with different seeds are measured on the same images."""


@dataclass
class AugmentedConf:
    """Distorts the images of a data set at random; the hook `mode_switch` can switch this off for the last epochs."""

    _target_: str = "hydraloop.examples.Augmented"
    dataset: Any = field(default_factory=lambda: DigitsConf(split="train"))
    """The data set of the images."""
    shift: float = 1.0
    """Maximum shift in pixels, in each direction. 1 of 8 pixels is the usual variation of handwriting in a box."""
    angle: float = 15.0
    """Maximum rotation in degrees, in both directions. With more than 15, a 7 looks like a 1."""
    cutout: int = 2
    """Side in pixels of a square that is covered. 2 covers a sixteenth, as in the Cutout paper on CIFAR-100."""
    ramp_epochs: int = 0
    """Epochs in which `shift`, `angle` and `cutout` grow to their full size. 0: full size from the start, because
    most recipes have no such growth."""


@dataclass
class DiabetesConf:
    """Ten measurements of a patient, and the progression of diabetes a year later."""

    _target_: str = "hydraloop.examples.Diabetes"
    split: str = "train"
    """`train` (312 patients), `val` (40) or `test` (90)."""
    root: Optional[str] = None
    """Folder with diabetes_data_raw.csv.gz and diabetes_target.csv.gz. Null: the copies in scikit-learn."""
    split_seed: int = 0
    """Seed of the split. Separate from `seed`, so that runs with different seeds are measured on the same patients."""


@dataclass
class PythonSourcesConf:
    """The source code of Python's standard library, as bytes."""

    _target_: str = "hydraloop.examples.PythonSources"
    split: str = "train"
    """`train` (90 % of the files), `val` or `test` (5 % each)."""
    block_size: int = 128
    """Bytes per sample; the target of each byte is the next one. 128, the context of `model=gpt`."""
    root: Optional[str] = None
    """Folder of .py files. Null: the standard library, which every machine has."""
    megabytes: Optional[float] = 8.0
    """Maximum size to read, in millions of bytes. 8 contains the standard library (7) and limits the time for larger
    folders to about 0.1 s. Null: no limit."""


@dataclass
class DigitsDataConf(DataConf):
    """`data=digits`, the default: a real task that a CPU learns in seconds."""

    train: Any = field(default_factory=lambda: DigitsConf(split="train"))
    val: Any = field(default_factory=lambda: DigitsConf(split="val"))
    test: Any = field(default_factory=lambda: DigitsConf(split="test"))


@dataclass
class DigitsAugmentedDataConf(DigitsDataConf):
    """`data=digits_augmented`: the digits, with random distortions of the training images, new in each epoch."""

    train: Any = field(default_factory=AugmentedConf)


@dataclass
class DiabetesDataConf(DataConf):
    """`data=diabetes`: a small regression; use it with `task=regression model=mlp`."""

    train: Any = field(default_factory=lambda: DiabetesConf(split="train"))
    val: Any = field(default_factory=lambda: DiabetesConf(split="val"))
    test: Any = field(default_factory=lambda: DiabetesConf(split="test"))


@dataclass
class PythonSourcesDataConf(DataConf):
    """`data=python_sources`: text for language models; use it with `task=language_modeling model=gpt`."""

    train: Any = field(default_factory=lambda: PythonSourcesConf(split="train"))
    val: Any = field(default_factory=lambda: _held_out("val"))
    test: Any = field(default_factory=lambda: _held_out("test"))


def _held_out(split: str) -> PythonSourcesConf:
    """Return a part to evaluate on, from the same folder and with the same block size as the train part."""
    return PythonSourcesConf(split=split, block_size=II("..train.block_size"), root=II("..train.root"))


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

    _target_: str = "hydraloop.examples.GPT"
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


DIABETES: Dict[str, Any] = {
    "defaults": [{"override /data": "diabetes"}, {"override /task": "regression"}, {"override /model": "mlp"}],
    "experiment_name": "diabetes",
}
"""`experiment=diabetes`: regression on a table."""

CHAR_LM: Dict[str, Any] = {
    "defaults": [
        {"override /data": "python_sources"},
        {"override /task": "language_modeling"},
        {"override /model": "gpt"},
        {"override /scheduler": ["linear", "cosine"]},  # a warm-up of 100 steps, times half a cosine down to 0
    ],
    "experiment_name": "char_lm",
    "task": {"model": {"context": "${data.train.block_size}"}},
    "data": {"loader": {"batch_size": 16}},  # 2,048 bytes: a short run needs many steps; larger batches are not faster
    "engine": {
        "max_iters": 1200,  # a third of an epoch
        "val_by_epoch": False,  # in iterations, because an epoch takes minutes
        "val_interval": 400,
        "threads": None,  # all cores: two are 1.7 times as fast as one
    },
    "optimizer": {
        "lr": 3e-3,  # high, which small models tolerate; with twice as much it hardly learns
        "betas": [0.9, 0.95],  # usual for transformers: a shorter average of squared gradients
        "weight_decay": 0.1,
        "groups": [{"match": "@norm|@bias|@embedding", "weight_decay": 0}],  # only matrices decay, as is usual
    },
    "default_hooks": {
        "grad_clip": {"max_norm": 1.0},  # usual for transformers: limits single steps that are far too large
        "checkpoint": {"by_epoch": False, "interval": 400},
    },
}
"""`experiment=char_lm`: a small GPT on the sources of Python's standard library, byte by byte. In two minutes on two
cores, it learns to predict them with 2.3 bits per byte; the frequency of each byte alone gives 4.5."""


def register(store: ConfigStore) -> None:
    """Store the options of `data`, `model` and `experiment`."""
    store.store(group="data", name="digits", package="data", node=DigitsDataConf)
    store.store(group="data", name="digits_augmented", package="data", node=DigitsAugmentedDataConf)
    store.store(group="data", name="diabetes", package="data", node=DiabetesDataConf)
    store.store(group="data", name="python_sources", package="data", node=PythonSourcesDataConf)
    store.store(group="model", name="small_cnn", package="task.model", node=SmallCNNConf)
    store.store(group="model", name="mlp", package="task.model", node=MLPConf)
    store.store(group="model", name="gpt", package="task.model", node=GPTConf)
    store.store(group="experiment", name="diabetes", package="_global_", node=DIABETES)
    store.store(group="experiment", name="char_lm", package="_global_", node=CHAR_LM)

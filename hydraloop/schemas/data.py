"""The group `data`: data sets and the loader that reads them."""

from dataclasses import dataclass, field
from typing import Any, Optional

from hydra.core.config_store import ConfigStore
from omegaconf import II


@dataclass
class LoaderConf:
    """How batches are made; `hydraloop.data.build_loader` gets all but `eval_batch_size`."""

    batch_size: int = 64
    """Samples a batch, on each rank. 64, so that the 1,259 digits give 20 iterations an epoch: enough, each cheap."""
    eval_batch_size: Optional[int] = None
    """Samples a batch in validation and test; null: `batch_size`, whose memory is known to suffice."""
    num_workers: int = 0
    """Processes that load; 0 loads in the training process, the fastest for data in memory."""
    pin_memory: Any = "auto"
    """Whether batches are copied into page-locked memory: true, false, or `auto`, where the device is a CUDA or XPU
    one, since copies to it are only asynchronous from there."""
    drop_last: bool = False
    """Whether the short last batch of a train epoch is left out. It is not: every sample counts, and its window is
    weighted by its samples."""
    persistent_workers: bool = False
    """Whether the workers outlive an epoch. Not: their random numbers would be seeded once, at their start, and a
    resumed run would not be the same to the last bit. True saves their start in each epoch (some 0.1 s each)."""
    prefetch_factor: Optional[int] = None
    """Batches that each worker loads ahead; null: torch's own (2)."""
    timeout: float = 0.0
    """Seconds to wait for a worker's batch; 0: for ever, torch's own, since slow storage is no error."""


@dataclass
class DigitsConf:
    """Handwritten digits, 8x8 pixels."""

    _target_: str = "hydraloop.data.Digits"
    split: str = "train"
    """`train` (1,259 images), `val` (179) or `test` (359)."""
    root: Optional[str] = None
    """A folder that holds digits.csv.gz; null: scikit-learn's own copy, so that nothing is downloaded."""
    split_seed: int = 0
    """Draws the split; apart from `seed`, so that runs with different seeds are measured on the same images."""


@dataclass
class AugmentedConf:
    """A data set of images, distorted at random; the hook `mode_switch` switches it off for the last epochs."""

    _target_: str = "hydraloop.data.Augmented"
    dataset: Any = field(default_factory=lambda: DigitsConf(split="train"))
    """Whose images they are."""
    shift: float = 1.0
    """Pixels an image is moved at most, in each direction; 1 of 8 is what handwriting in a box varies by."""
    angle: float = 15.0
    """Degrees it is turned at most, either way; with more a 7 is hard to tell from a 1."""
    cutout: int = 2
    """Pixels of a side of the square that is covered; a sixteenth of a digit, as in the source on CIFAR-100."""
    ramp_epochs: int = 0
    """Epochs in which all three grow to their full size, with the hook `set_epoch_info`; 0: full at once, since without
    that hook nobody tells the epoch."""


@dataclass
class DiabetesConf:
    """Ten measurements of a patient, and how far diabetes has gone a year later."""

    _target_: str = "hydraloop.data.Diabetes"
    split: str = "train"
    """`train` (312 patients), `val` (40) or `test` (90)."""
    root: Optional[str] = None
    """A folder that holds diabetes_data_raw.csv.gz and diabetes_target.csv.gz; null: scikit-learn's copy."""
    split_seed: int = 0
    """Draws the split; apart from `seed`, so that runs with different seeds are measured on the same patients."""


@dataclass
class PythonSourcesConf:
    """The sources of Python's own standard library, as bytes."""

    _target_: str = "hydraloop.data.PythonSources"
    split: str = "train"
    """`train` (90 % of the files), `val` or `test` (5 % each)."""
    block_size: int = 128
    """Bytes of a sample, each with the one behind it as its target; the context of `model=gpt`."""
    root: Optional[str] = None
    """A folder to take the .py files of; null: the standard library, which is on every machine."""
    megabytes: Optional[float] = 8.0
    """Million bytes to read at most, so that any folder is read in 0.1 s; the library's 7 are within it. Null: no
    limit."""


@dataclass
class DataConf:
    """To build on: `defaults: [base, _self_]` in a data option of one's own gives it the typed loader."""

    train: Any = None
    """What is trained on."""
    val: Any = None
    """What is validated on; null: no validation."""
    test: Any = None
    """What is tested on after training; null: no test."""
    loader: LoaderConf = field(default_factory=LoaderConf)
    """The same for all three; only the train loader shuffles."""


@dataclass
class DigitsDataConf:
    """`data=digits`, the default: a real task that a CPU learns in seconds."""

    train: Any = field(default_factory=lambda: DigitsConf(split="train"))
    """What is trained on."""
    val: Any = field(default_factory=lambda: DigitsConf(split="val"))
    """What is validated on; null: no validation."""
    test: Any = field(default_factory=lambda: DigitsConf(split="test"))
    """What is tested on after training; null: no test."""
    loader: LoaderConf = field(default_factory=LoaderConf)
    """The same for all three; only the train loader shuffles."""


@dataclass
class DigitsAugmentedDataConf:
    """`data=digits_augmented`: the digits, those of the train part distorted at random, anew in each epoch."""

    train: Any = field(default_factory=AugmentedConf)
    """What is trained on."""
    val: Any = field(default_factory=lambda: DigitsConf(split="val"))
    """What is validated on, as it is; null: no validation."""
    test: Any = field(default_factory=lambda: DigitsConf(split="test"))
    """What is tested on after training, as it is; null: no test."""
    loader: LoaderConf = field(default_factory=LoaderConf)
    """The same for all three; only the train loader shuffles."""


@dataclass
class DiabetesDataConf:
    """`data=diabetes`: a small regression; goes with `task=regression model=mlp`."""

    train: Any = field(default_factory=lambda: DiabetesConf(split="train"))
    """What is trained on."""
    val: Any = field(default_factory=lambda: DiabetesConf(split="val"))
    """What is validated on; null: no validation."""
    test: Any = field(default_factory=lambda: DiabetesConf(split="test"))
    """What is tested on after training; null: no test."""
    loader: LoaderConf = field(default_factory=LoaderConf)
    """The same for all three; only the train loader shuffles."""


@dataclass
class PythonSourcesDataConf:
    """`data=python_sources`: text for language models; goes with `task=language_modeling model=gpt`."""

    train: Any = field(default_factory=lambda: PythonSourcesConf(split="train"))
    """What is trained on."""
    val: Any = field(default_factory=lambda: _held_out("val"))
    """What is validated on; null: no validation."""
    test: Any = field(default_factory=lambda: _held_out("test"))
    """What is tested on after training; null: no test."""
    loader: LoaderConf = field(default_factory=LoaderConf)
    """The same for all three; only the train loader shuffles."""


def _held_out(split: str) -> PythonSourcesConf:
    """A part to evaluate on, of the same folder and in blocks of the same size as the train part."""
    return PythonSourcesConf(split=split, block_size=II("..train.block_size"), root=II("..train.root"))


def register(store: ConfigStore) -> None:
    """Store the options of `data`."""
    store.store(group="data", name="base", package="data", node=DataConf)
    store.store(group="data", name="digits", package="data", node=DigitsDataConf)
    store.store(group="data", name="digits_augmented", package="data", node=DigitsAugmentedDataConf)
    store.store(group="data", name="diabetes", package="data", node=DiabetesDataConf)
    store.store(group="data", name="python_sources", package="data", node=PythonSourcesDataConf)

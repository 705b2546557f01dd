"""The group `data`: data sets and their loader."""

from dataclasses import dataclass, field
from typing import Any, Optional

from hydra.core.config_store import ConfigStore
from omegaconf import II


@dataclass
class LoaderConf:
    """How batches are made: the arguments of `hydraloop.data.build_loader`, and `eval_batch_size`."""

    batch_size: int = 64
    """Samples per batch on each rank. 64 gives 20 cheap iterations per epoch of the 1,259 digits."""
    eval_batch_size: Optional[int] = None
    """Samples per batch in validation and test. Null: `batch_size`, which is known to fit into memory."""
    num_workers: int = 0
    """Worker processes. 0 loads in the training process, which is the fastest for data in memory."""
    pin_memory: Any = "auto"
    """Whether batches are copied into page-locked memory: true, false, or `auto`: if the device is CUDA or XPU, because
    copies to it are only asynchronous from page-locked memory."""
    drop_last: bool = False
    """Whether to leave out the short last batch of a train epoch. False: every sample counts, and the last accumulation
    window is weighted by its samples."""
    persistent_workers: bool = False
    """Whether workers live longer than an epoch. False: persistent workers are seeded only once, so a resumed run would
    not be identical to the last bit. True saves about 0.1 s per worker and epoch."""
    prefetch_factor: Optional[int] = None
    """Batches that each worker loads ahead. Null: torch's default (2)."""
    timeout: float = 0.0
    """Seconds to wait for a batch from a worker. 0, torch's default: no limit, because slow storage is not an error."""


@dataclass
class DigitsConf:
    """Handwritten digits, 8x8 pixels."""

    _target_: str = "hydraloop.data.Digits"
    split: str = "train"
    """`train` (1,259 images), `val` (179) or `test` (359)."""
    root: Optional[str] = None
    """Folder with digits.csv.gz. Null: the copy in scikit-learn, so that nothing is downloaded."""
    split_seed: int = 0
    """Seed of the split. Separate from `seed`, so that runs with different seeds are measured on the same images."""


@dataclass
class AugmentedConf:
    """Distorts the images of a data set at random; the hook `mode_switch` can switch this off for the last epochs."""

    _target_: str = "hydraloop.data.Augmented"
    dataset: Any = field(default_factory=lambda: DigitsConf(split="train"))
    """The data set of the images."""
    shift: float = 1.0
    """Maximum shift in pixels, in each direction. 1 of 8 pixels is the usual variation of handwriting in a box."""
    angle: float = 15.0
    """Maximum rotation in degrees, in both directions. With more than 15, a 7 looks like a 1."""
    cutout: int = 2
    """Side in pixels of a square that is covered. 2 covers a sixteenth, as in the Cutout paper on CIFAR-100."""
    ramp_epochs: int = 0
    """Epochs in which `shift`, `angle` and `cutout` grow to their full size. 0: full size from the start, because the
    growth needs the hook `set_epoch_info`."""


@dataclass
class DiabetesConf:
    """Ten measurements of a patient, and the progression of diabetes a year later."""

    _target_: str = "hydraloop.data.Diabetes"
    split: str = "train"
    """`train` (312 patients), `val` (40) or `test` (90)."""
    root: Optional[str] = None
    """Folder with diabetes_data_raw.csv.gz and diabetes_target.csv.gz. Null: the copies in scikit-learn."""
    split_seed: int = 0
    """Seed of the split. Separate from `seed`, so that runs with different seeds are measured on the same patients."""


@dataclass
class PythonSourcesConf:
    """The source code of Python's standard library, as bytes."""

    _target_: str = "hydraloop.data.PythonSources"
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
class DataConf:
    """Base of all data options. Begin your own file with `defaults: [base, _self_]` to get the loader's options."""

    train: Any = None
    """Training data."""
    val: Any = None
    """Validation data. Null: no validation."""
    test: Any = None
    """Test data, used once after training. Null: no test."""
    loader: LoaderConf = field(default_factory=LoaderConf)
    """Options of the three loaders; only the train loader shuffles."""


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


def register(store: ConfigStore) -> None:
    """Store the options of `data`."""
    store.store(group="data", name="base", package="data", node=DataConf)
    store.store(group="data", name="digits", package="data", node=DigitsDataConf)
    store.store(group="data", name="digits_augmented", package="data", node=DigitsAugmentedDataConf)
    store.store(group="data", name="diabetes", package="data", node=DiabetesDataConf)
    store.store(group="data", name="python_sources", package="data", node=PythonSourcesDataConf)

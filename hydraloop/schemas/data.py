"""The group `data`: data sets and their loaders."""

from dataclasses import dataclass, field, fields
from typing import Any, Dict, Optional, Tuple

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ValidationError

from hydraloop.errors import UserError, suggestion
from hydraloop.schemas.option_checks import check_at_least, check_choice
from hydraloop.schemas.sweep import open_mapping

SPLITS = ("train", "val", "test")
AT_LEAST = {
    "batch_size": (1, "Use 1 or more."),
    "eval_batch_size": (1, "Use 1 or more, or null for batch_size."),
    "num_workers": (0, "Use 0 to load in the training process."),
    "prefetch_factor": (1, "Use 1 or more, or null."),
    "timeout": (0, "Use 0 to wait forever."),
    "steps_per_epoch": (1, "Use 1 or more."),
}
"""By option of a loader: the lowest value, and the fix. Null is always accepted."""
OF_TRAINING = ("sampler", "batch_sampler", "drop_last", "steps_per_epoch")
"""Options of `data.loader` that val and test do not take from it: they define an epoch of training."""


@dataclass
class LoaderConf:
    """How batches are made: the arguments of `hydraloop.data.build_loader`, `eval_batch_size`, and those of streams."""

    batch_size: int = 64
    """Samples per batch on each rank. 64: a thousand samples still give 16 steps in an epoch."""
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
    persistent_workers: bool = True
    """Whether workers live longer than an epoch; those of a test never do. True saves about 0.1 s per worker and epoch.
    False: each epoch starts workers with copies of the current data set. No effect on a stream."""
    prefetch_factor: Optional[int] = None
    """Batches that each worker loads ahead. Null: torch's default (2)."""
    timeout: float = 0.0
    """Seconds to wait for a batch from a worker. 0, torch's default: no limit, because slow storage is not an error."""
    collate_fn: Any = None
    """Makes a batch of a list of samples: a node whose `_target_` is a function, or a class with `__call__`. Null:
    torch's `default_collate`, which stacks tensors of one shape."""
    sampler: Any = None
    """An object with `__len__` and with `__iter__`, which yields the indices of an epoch of all ranks: a node with
    `_target_`. With `_partial_: true`, it is called with the data set. Its draws are seeded by (seed, epoch). Null: all
    samples, shuffled for training, because most training needs nothing else."""
    batch_sampler: Any = None
    """Yields lists of indices, each the batch of one rank; a node as for `sampler`. `batch_size` and `drop_last` then
    have no effect. Null: batches of `batch_size`, which need no other code."""
    worker_init_fn: Any = None
    """Called in each worker with its number, after the seeds are set: a node with `_target_`. Null: nothing is called,
    because workers are seeded without it."""
    multiprocessing_context: Optional[str] = None
    """How workers are started: `fork`, `spawn` or `forkserver`. Null: torch's default, which is the fastest for most
    data."""
    steps_per_epoch: Optional[int] = None
    """Batches of an epoch of a stream, on each rank. Null: from the length of the stream; an evaluation then reads all
    samples. Refused for a data set with indices, because its epoch has all its samples."""
    skip_on_resume: bool = False
    """Whether a resumed run reads a stream forward to its position, for a stream without `state_dict`. False: the state
    is restored, because reading forward can take as long as the run has trained."""
    split_stream: Optional[bool] = None
    """Whether each worker of each rank reads the whole stream and keeps every n-th sample. False: the stream splits
    itself. Null: its method `split(index, count)` if it has one, else as true; an IterableDataset of torch is refused
    with several workers or ranks, because some split themselves."""


@dataclass
class DataConf:
    """Base of all data options. Begin your own file with `defaults: [base, _self_]` to get the loader's options."""

    train: Any = None
    """Training data: a node with `_target_`."""
    val: Any = None
    """Validation data, a node with `_target_`; or several by name, `{a: {…}, b: {…}}`, whose metrics are `a/accuracy`
    and `b/accuracy`. Null: no validation."""
    test: Any = None
    """Test data, used once after training; several as in `val`. Null: no test."""
    loader: LoaderConf = field(default_factory=LoaderConf)
    """Options of the three loaders; only the train loader shuffles."""
    train_loader: Any = field(default_factory=open_mapping)
    """Options of the train loader alone: `data.train_loader.collate_fn={…}`. Empty: those of `loader`."""
    val_loader: Any = field(default_factory=open_mapping)
    """Options of the val loader alone. It does not take `sampler`, `batch_sampler`, `drop_last` and `steps_per_epoch`
    from `loader`, because these define training. Empty: the other options of `loader`."""
    test_loader: Any = field(default_factory=open_mapping)
    """Options of the test loader alone, as `val_loader`."""


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
    """`data=digits`: handwritten digits, a real task that a CPU learns in seconds."""

    train: Any = field(default_factory=lambda: DigitsConf(split="train"))
    val: Any = field(default_factory=lambda: DigitsConf(split="val"))
    test: Any = field(default_factory=lambda: DigitsConf(split="test"))


def loader_options(data: DictConfig, split: str) -> Tuple[Dict[str, Any], Dict[str, str]]:
    """Return the options of a split's loader: those of `data.<split>_loader`, then `data.loader`, then the defaults.

    The data may lack each of these sections.

    Returns:
        ({option: value}, {option: the key that sets it}). `batch_size` is that of the split. Nodes are not copied.

    Raises:
        UserError: an option is unknown, or its value is of another type or out of range.
    """
    values: Dict[str, Any] = {entry.name: entry.default for entry in fields(LoaderConf)}
    keys = {name: f"data.loader.{name}" for name in values}
    for section in ("loader", f"{split}_loader"):
        given: Any = data.get(section) or {}
        if not isinstance(given, (DictConfig, dict)):
            remedy = f"Set each of them: data.{section}.batch_size=8."
            raise UserError(f"expected options, got {given!r}", key=f"data.{section}", remedy=remedy)
        is_typed = not given or OmegaConf.get_type(given) is LoaderConf  # its values have been checked
        typed: Any = given if is_typed else OmegaConf.structured(LoaderConf)
        for name, value in given.items():
            key = f"data.{section}.{name!s}"
            if name not in values:
                raise UserError("there is no such option", key=key, remedy=suggestion(str(name), values))
            try:
                if not is_typed:
                    typed[name] = value
            except ValidationError as error:
                example = "null" if typed[name] is None else str(typed[name]).lower()
                fix = f"Try {key}={example}."
                raise UserError(str(error).splitlines()[0], key=key, remedy=fix) from error
            if split == "train" or section != "loader" or name not in OF_TRAINING:
                values[name] = value if is_typed or isinstance(value, DictConfig) else typed[name]
                keys[name] = key
    for name, (least, remedy) in AT_LEAST.items():
        check_at_least(least, remedy, **{keys[name]: values[name]})
    for name, choices in (("pin_memory", ("auto",)), ("multiprocessing_context", ("fork", "spawn", "forkserver"))):
        if isinstance(values[name], str):
            check_choice(choices, **{keys[name]: values[name]})
    eval_batch_size = values.pop("eval_batch_size")
    if split != "train" and eval_batch_size is not None and keys["batch_size"] == "data.loader.batch_size":
        values["batch_size"] = eval_batch_size
    return values, keys


def register(store: ConfigStore) -> None:
    """Store the options of `data`, and `hydraloop/no_data`, with which an experiment begins that has other data."""
    store.store(group="data", name="base", package="data", node=DataConf)
    store.store(group="data", name="digits", package="data", node=DigitsDataConf)
    store.store(group="hydraloop", name="no_data", package="_global_", node={"data": dict.fromkeys(SPLITS)})

"""Options of the hooks that hand a run's records to a tracking service: mlflow, tensorboard, wandb."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Dict, List, Optional, Tuple, Union

from hydra.core.config_store import ConfigStore


@dataclass
class MLflowLoggerHookConf:
    """The run at MLflow: metrics, parameters, config, pictures, system metrics; a sweep's runs below one parent."""

    default_priority: ClassVar[int] = 90
    mount_points: ClassVar[Tuple[str, ...]] = ("before_run", "before_train", "on_log", "after_run")
    runs_after: ClassVar[Tuple[str, ...]] = ("logger",)

    _target_: str = "hydraloop.hooks.MLflowLoggerHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: VERY_LOW, so that other hooks' records stand in front."""
    on_error: Optional[str] = "warn"
    """`raise`, `warn` or `disable`; no training should end for its tracker: `metrics.jsonl` has all of it, and
    `sync.py` sends it later."""
    tracking_uri: Optional[str] = None
    """`http://…`, `sqlite:///…`, or another address that MLflow knows. Null: that of `MLFLOW_TRACKING_URI`, else
    `sqlite:///mlflow.db` in the working directory, MLflow's own default, which `mlflow ui` shows there."""
    experiment: Optional[str] = None
    """Name of the experiment; null: that of `MLFLOW_EXPERIMENT_NAME`, else `experiment_name`, so that all trackers sort
    runs alike."""
    run_name: Optional[str] = None
    """Name of the run; null: the job's overrides in a sweep, else date and time of the run directory, by which it is
    found."""
    tags: Dict[str, Any] = field(default_factory=dict)
    """More tags of the run, by name (`+hooks.mlflow.tags.team=a`). None: git commit, command, host, world size and
    versions are there anyway."""
    system_metrics: bool = True
    """Whether CPU, memory, disk, network and NVIDIA GPUs of rank 0's machine are logged; true: another process reads
    them, and they say why a run is slow."""
    system_metrics_interval: float = 10.0
    """Seconds between two points, above 0, each a mean; 10 is MLflow's own."""
    system_metrics_nodes: bool = False
    """Whether the same is logged of the machines that rank 0 is not on, as `system/node_1/…`, for jobs of several
    nodes. False: it takes one more process on each, which must reach MLflow itself. That means a server: the default,
    a database in a file, is there for other machines only in a folder that all share."""
    checkpoints: Optional[str] = None
    """Checkpoint files stored as artifacts: `best` or `last`, when the run ends, or `all`, as they appear. Null: none;
    they are large, and in the run directory anyway."""
    pictures: bool = True
    """Whether pictures, of `visualization`, are stored too; true: they are small, and seen over the iterations."""
    log_code: bool = False
    """Whether `code.patch`, the uncommitted changes of the code, is stored as an artifact; false: no code leaves the
    machine."""
    flush_timeout: float = 10.0
    """Seconds that sending the rest may take after the run's end, from 0 to 86,400; 10: a server that works takes less,
    and nobody waits long for one that does not. `sync.py` sends what is left."""


@dataclass
class TensorBoardLoggerHookConf:
    """The run in TensorBoard: scalars, pictures, hyperparameters with the final metrics, histograms as an option."""

    default_priority: ClassVar[int] = 90
    mount_points: ClassVar[Tuple[str, ...]] = (
        "before_run",
        "before_train",
        "before_optimizer_step",
        "after_train_iter",
        "on_log",
        "after_run",
    )
    runs_after: ClassVar[Tuple[str, ...]] = ("logger",)

    _target_: str = "hydraloop.hooks.TensorBoardLoggerHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: VERY_LOW, so that gradients are counted as `grad_clip` leaves them."""
    on_error: Optional[str] = "warn"
    """`raise`, `warn` or `disable`; no training should end for its charts, and `metrics.jsonl` has their numbers."""
    histograms: Optional[int] = None
    """Iterations between two histograms of each weight and gradient, at least 1. Null: none; they cost two host syncs,
    time over all parameters, and some 2 kB a parameter in a file each time."""
    hparams: Optional[List[str]] = None
    """Columns of the HPARAMS table: keys, or beginnings of keys up to a dot (`optimizer`, `hooks.ema`). Null: what was
    given on the command line, in a sweep its axes, and what is well known (seed, model, optimizer and its learning rate
    and weight decay, batch size, precision); the whole config would be 150 columns, nearly all alike. TensorBoard
    takes the columns of all runs from one of them: to compare runs of several command lines, name them here."""
    pictures: bool = True
    """Whether pictures are copied into the event files; true: they are seen beside the charts. False where they are
    many and the disk is small."""
    flush_timeout: float = 10.0
    """Seconds that writing the rest may take after the run's end, from 0 to 86,400; 10 as for the other trackers, far
    more than a file needs."""


@dataclass
class WandbLoggerHookConf:
    """The run at Weights & Biases, online, or in files to be uploaded later: metrics, config, pictures, its end."""

    default_priority: ClassVar[int] = 90
    mount_points: ClassVar[Tuple[str, ...]] = ("before_run", "before_train", "on_log", "after_run")
    runs_after: ClassVar[Tuple[str, ...]] = ("logger",)

    _target_: str = "hydraloop.hooks.WandbLoggerHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: VERY_LOW, so that all records of an iteration are written by then."""
    on_error: Optional[str] = "warn"
    """`raise`, `warn` or `disable`; no training should end for its charts, and `metrics.jsonl` has their numbers."""
    mode: str = "auto"
    """`online`, `offline` (files in `<run_dir>/wandb/`, for `wandb sync`), `disabled` (nothing), or `auto`:
    `WANDB_MODE`, else online where an API key is configured, else offline. It never asks: online without a key, by
    this option or by `WANDB_MODE`, nothing is sent, and a warning says what to do."""
    project: Optional[str] = None
    """At W&B, at most 128 characters; null: `WANDB_PROJECT`, else `experiment_name`, so that runs to be compared are
    together."""
    entity: Optional[str] = None
    """A user or team; null: W&B's own default, `WANDB_ENTITY` or the key's owner."""
    group: Optional[str] = None
    """Of runs; null: `WANDB_RUN_GROUP`, else the sweep's name (without a date in it, a part of its random id is added),
    outside a sweep the run's, so that parts of one run are together."""
    job_type: Optional[str] = None
    """A label such as `train`; null: `WANDB_JOB_TYPE`, else none."""
    tags: Optional[List[str]] = None
    """Labels, of 1 to 64 characters each; null: `WANDB_TAGS`, parted by commas, else none: what tells runs apart is in
    their config."""
    notes: Optional[str] = None
    """A description; null: `WANDB_NOTES`, else none. Secrets in it are masked, as in all names."""
    name: Optional[str] = None
    """Of the run; null: `WANDB_NAME`, else its job's overrides in a sweep, else date, time and id of its directory. A
    name that is given is the same for all jobs of a sweep."""
    pictures: bool = True
    """Whether pictures are sent too; true: they are seen beside the charts. False where they are many."""
    log_code: bool = False
    """Whether `code.patch`, the uncommitted changes of the code, is sent as a file; false: no code leaves the
    machine."""
    checkpoints: Optional[str] = None
    """`best` and `last` (as the run ends) or `all` (as they are written) are sent as artifacts of type model; null:
    none, they are large, and W&B's storage is limited."""
    system_metrics: bool = True
    """Whether W&B measures the training process and its machine (CPU, memory, GPU); true: it costs training nothing,
    since it is done in another process."""
    flush_timeout: float = 10.0
    """Seconds that sending the rest may take after the run's end, from 0 to 86,400; 10 is what one waits for gladly,
    and `sync.py` sends what was left."""


def register(store: ConfigStore) -> None:
    """Store the trackers."""
    store.store(group="hooks", name="mlflow", package="hooks.mlflow", node=MLflowLoggerHookConf)
    store.store(group="hooks", name="tensorboard", package="hooks.tensorboard", node=TensorBoardLoggerHookConf)
    store.store(group="hooks", name="wandb", package="hooks.wandb", node=WandbLoggerHookConf)

"""Options of the hooks that send a run's records to a tracking service: mlflow, tensorboard, wandb."""

from dataclasses import dataclass, field
from typing import Any, Dict, Optional

from hydra.core.config_store import ConfigStore

from hydraloop.schemas.hook import HookConf, store_hooks


@dataclass
class _TrackerConf(HookConf):
    """What all trackers have in common."""

    on_error: Optional[str] = "warn"
    interval: int = 1
    """The records of every n-th iteration are sent, at least 1, by the rule of all intervals: 100 sends those of the
    iterations 100, 200, …, as far as the logger makes them. The records of evaluations, and those of pictures and
    histograms, are always sent. 1: all, because the logger has an interval already."""


@dataclass
class MLflowLoggerHookConf(_TrackerConf):
    """Sends metrics, parameters, config, pictures and system metrics to MLflow; jobs of a sweep share a parent run."""

    _target_: str = "hydraloop.hooks.MLflowLoggerHook"
    tracking_uri: Optional[str] = None
    """`http://…`, `sqlite:///…`, or another address that MLflow accepts. Null: `MLFLOW_TRACKING_URI`, else
    `sqlite:///mlflow.db` in the working directory, MLflow's default, which `mlflow ui` shows there.
    `MLFLOW_EXPERIMENT_NAME` names the experiment; without it, it is `experiment_name`, as for the other trackers."""
    tags: Dict[str, Any] = field(default_factory=dict)
    """Additional tags of the run, by name (`+hooks.mlflow.tags.team=a`). Git commit, command, host, world size and
    versions are always tags. `mlflow.runName` is the name of the run, and `mlflow.note.content` the text at the top of
    its page."""
    system_metrics: bool = True
    """Whether MLflow's own monitor logs CPU, memory, disk, network and GPUs of rank 0's machine, in single runs. True:
    they show why a run is slow, and a separate process reads them. `MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL` sets the
    seconds between two points (10). The monitor ends if one of its requests fails."""
    checkpoints: Optional[str] = None
    """Checkpoint files to store as artifacts at the end of the run: `best`, `last` or `all`. Null: none, because they
    are large and are in the run directory."""
    log_code: bool = False
    """Whether to store `code.patch`, the uncommitted changes of the code. False: no code leaves the machine."""
    flush_timeout: float = 10.0
    """Seconds that sending the rest may take at the end of the run, at least 0. 10: a working server needs less,
    and a broken one should not delay the exit. `python -m hydraloop sync` sends what is left."""


@dataclass
class TensorBoardLoggerHookConf(_TrackerConf):
    """Shows metrics, pictures, the config and a table of hyperparameters in TensorBoard; histograms are an option."""

    _target_: str = "hydraloop.hooks.TensorBoardLoggerHook"
    histograms: Optional[int] = None
    """Iterations between two histograms of each weight and gradient, at least 1. Null: none. Each costs a host sync and
    a copy to the host for each tensor, and about 2 kB per parameter in a file."""
    flush_timeout: float = 10.0
    """Seconds that writing the rest may take at the end of the run, at least 0. 10, as for the other trackers; a
    file needs far less."""


@dataclass
class WandbLoggerHookConf(_TrackerConf):
    """Sends metrics, config, objects and the result to Weights & Biases, or writes files to upload."""

    _target_: str = "hydraloop.hooks.WandbLoggerHook"
    init: Dict[str, Any] = field(default_factory=dict)
    """Further arguments of `wandb.init`, such as `+hooks.wandb.init.project=digits`, `mode`, `entity`, `tags`, `notes`,
    `group`, `job_type`, `name` and `settings` (`+hooks.wandb.init.settings.x_disable_stats=true`: no system metrics).
    Without them, W&B's variables (`WANDB_PROJECT`, `WANDB_MODE`, …) count. Otherwise `project` is `experiment_name`,
    `name` that of the run, and `group` that of the sweep. Secrets in them are masked."""
    log_code: bool = False
    """Whether to send `code.patch`, the uncommitted changes of the code. False: no code leaves the machine."""
    checkpoints: Optional[str] = None
    """Checkpoint files to send as artifacts of type model: `best` and `last` at the end of the run, or `all` as they
    are written. The best one has the alias `best`. Null: none, because they are large and W&B's storage is limited."""
    flush_timeout: float = 10.0
    """Seconds that sending the rest may take at the end of the run, at least 0. 10, a short wait;
    `python -m hydraloop sync` sends what is left."""


def register(store: ConfigStore) -> None:
    """Store them in the group `hooks`."""
    store_hooks(store, mlflow=MLflowLoggerHookConf, tensorboard=TensorBoardLoggerHookConf, wandb=WandbLoggerHookConf)

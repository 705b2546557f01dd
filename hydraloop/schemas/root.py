"""The root of the config: what a composed run looks like, and where its files go."""

from dataclasses import dataclass, field
from typing import Any, Dict, Optional

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from hydraloop.schemas.distributed import DistributedConf
from hydraloop.schemas.engine import EngineConf


@dataclass
class InitConf:
    """Weights to start a part of the model from."""

    checkpoint: Optional[str] = None
    """A checkpoint file (`.pth`, or `.safetensors`); null: the model's own initialisation."""
    prefix: Optional[str] = None
    """Take only the entries that begin with this (`backbone.`), the prefix removed if the model has none such; put in
    front of the file's names if the file has none such. Null: all."""


@dataclass
class Config:
    """Every key of a run's config; the README explains them with examples."""

    seed: int = 0
    """Of every random number generator; the same seed gives the same run. 0: repeatable without
    asking."""
    experiment_name: str = "digits"
    """Names the trackers' experiment, and tells `resume=auto` which runs are the same."""
    resume: Optional[str] = None
    """`auto`, a run directory, or a checkpoint file to go on from; null: a new run."""
    resume_strict: bool = True
    """Whether a missing or unknown entry of a resumed checkpoint is an error; it is: training on would be
    another run."""
    load_from: Optional[str] = None
    """A checkpoint file (`.pth`, or `.safetensors`) to take weights from, nothing else; null: none."""
    weights: str = "averaged"
    """`averaged`: `load_from`, validation and test use averaged weights where there are any; `raw`: never."""
    init: InitConf = field(default_factory=InitConf)
    task: Any = MISSING
    """Model, loss and metrics; a group."""
    data: Any = MISSING
    """Data sets and loader; a group."""
    optimizer: Any = MISSING
    """A group."""
    scheduler: Dict[str, Any] = field(default_factory=dict)
    """Schedules by name, a group; empty: constant."""
    precision: Any = MISSING
    """A group."""
    engine: EngineConf = field(default_factory=EngineConf)
    distributed: DistributedConf = field(default_factory=DistributedConf)
    default_hooks: Dict[str, Any] = field(default_factory=dict)
    """Hooks every run has unless they are removed; a group. `default_hooks.checkpoint=null` removes one."""
    hooks: Dict[str, Any] = field(default_factory=dict)
    """Hooks selected for this run; a group."""


DEFAULT_HOOKS = [
    "runtime_info",
    "timer",
    "sampler_seed",
    "grad_clip",
    "logger",
    "param_scheduler",
    "checkpoint",
    "progress",
]
"""In the order of registration, which decides ties of priority."""

# Two runs started in the same second never share a directory: ${run_id:} is random, and the same within one start.
HYDRA_SETTINGS: Dict[str, Any] = {
    "run": {"dir": "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}-${run_id:}"},
    "sweep": {
        "dir": "multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}-${run_id:}",
        "subdir": "${hydra.job.num}",
    },
    "job": {"name": "train", "chdir": False},
}

_FORMATTER = "hydraloop.cli.console.MaskingFormatter"
_FORMATTERS: Dict[str, Any] = {
    "plain": {"class": _FORMATTER, "format": "%(message)s"},
    "full": {"class": _FORMATTER, "format": "[%(asctime)s][%(name)s][%(levelname)s] %(message)s"},
}
_CONSOLE: Dict[str, Any] = {"class": "hydraloop.cli.console.ConsoleHandler", "formatter": "plain"}

HYDRA_LOGGING: Dict[str, Any] = {
    "version": 1,
    "formatters": _FORMATTERS,
    "handlers": {"console": _CONSOLE},
    "root": {"level": "INFO", "handlers": ["console"]},
    "disable_existing_loggers": False,
}
JOB_LOGGING: Dict[str, Any] = {
    "version": 1,
    "formatters": _FORMATTERS,
    "handlers": {
        "console": _CONSOLE,
        "file": {
            "class": "logging.FileHandler",
            "formatter": "full",
            "filename": "${hydra.runtime.output_dir}/train.log",
        },
    },
    "root": {"level": "INFO", "handlers": ["console", "file"]},
    "disable_existing_loggers": False,
}


def register(store: ConfigStore) -> None:
    """Store `hydraloop`, the first entry of a config.yaml's defaults list."""
    store.store(group="hydraloop", name="schema", package="_global_", node=Config)
    store.store(group="hydra/hydra_logging", name="hydraloop", package="hydra.hydra_logging", node=HYDRA_LOGGING)
    store.store(group="hydra/job_logging", name="hydraloop", package="hydra.job_logging", node=JOB_LOGGING)
    store.store(
        name="hydraloop",
        node={
            "defaults": [
                "/hydraloop/schema",
                {"override /hydra/hydra_logging": "hydraloop"},
                {"override /hydra/job_logging": "hydraloop"},
                "_self_",
            ],
            "hydra": HYDRA_SETTINGS,
        },
    )

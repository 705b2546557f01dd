"""The root of the config: the keys of a run, and where its files go."""

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from hydraloop.schemas.engine import DistributedConf, EngineConf
from hydraloop.schemas.sweep import SweepConf


@dataclass
class InitConf:
    """Initial weights for a part of the model."""

    checkpoint: Optional[str] = None
    """A file of weights: a checkpoint, a state dict, or `.safetensors`. Null: the model's own initialisation."""
    prefix: Optional[str] = None
    """Load only entries that begin with this prefix (`backbone.`). It is removed if no name of the model begins with
    it, and added if no name in the file does. Null: all entries."""
    exclude: List[str] = field(default_factory=list)
    """Modules or entries to leave out, by their names in the model: names (`head`), globs (`layers.*`), or `re:` and a
    regular expression. Empty: all entries that have a name of the model are loaded."""
    mismatched: str = "error"
    """What happens to an entry of another shape than the model's: `error`, or `skip`, which keeps the model's own
    initialisation. Error: another shape is usually the wrong file."""


@dataclass
class Config:
    """Every key of a run's config."""

    seed: int = 0
    """Seed of every random number generator. 0: on a CPU, the same command gives the same run; on a GPU, this also
    needs `engine.deterministic=true`."""
    experiment_name: str = "project"
    """Name of the experiment in trackers; `resume=auto` looks for runs with the same name."""
    resume: Optional[str] = None
    """`auto`, a run directory, or a checkpoint file to continue from. Null: a new run."""
    resume_strict: bool = True
    """Whether a missing or unknown entry of a resumed checkpoint is an error. True: without it, the run would not be
    the same."""
    load_from: Optional[str] = None
    """A file to load only weights from: a checkpoint, a state dict, or `.safetensors`. All
    entries must fit. Null: none."""
    weights: str = "averaged"
    """`averaged`: `load_from`, validation and test use the averaged weights if there are any. `raw`: never."""
    init: InitConf = field(default_factory=InitConf)
    task: Any = MISSING
    """Model, loss and metrics; a group."""
    data: Any = MISSING
    """Data sets and loader; a group."""
    optimizer: Any = MISSING
    """The optimizer; a group."""
    scheduler: Dict[str, Any] = field(default_factory=dict)
    """Schedules by name; a group. Empty: constant learning rate."""
    precision: Any = MISSING
    """Number format of the computation; a group."""
    engine: EngineConf = field(default_factory=EngineConf)
    distributed: DistributedConf = field(default_factory=DistributedConf)
    default_hooks: Dict[str, Any] = field(default_factory=dict)
    """Hooks of every run; a group. `default_hooks.checkpoint=null` removes one."""
    hooks: Dict[str, Any] = field(default_factory=dict)
    """Hooks selected for this run; a group."""
    sweep: SweepConf = field(default_factory=SweepConf)
    detach: bool = False
    """Whether the command returns at once and its run or sweep continues in the background. False: the terminal shows
    it."""
    my: Dict[str, Any] = field(default_factory=dict)
    """Keys of your own, which other values use: `my: {num_classes: 10}` in a config file, `${my.num_classes}` and
    `my.num_classes=20`. Empty: none."""


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
"""In the order of registration, which decides between equal priorities."""

_CHOICES: List[Dict[str, Any]] = [
    {"/data": "base"},
    {"/task": "classification"},
    {"/model": None},
    {"/optimizer": "adamw"},
    {"/scheduler": "cosine"},
    {"/precision": "fp32"},
    {"/default_hooks": ["last_and_best" if name == "checkpoint" else name for name in DEFAULT_HOOKS]},
    {"/hooks": []},
]
"""What `hydraloop/project` selects in each group. A project names its data and its model."""

# ${run_id:} is random and fixed within one start, so that runs of the same second have different directories.
HYDRA_SETTINGS: Dict[str, Any] = {
    "run": {"dir": "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}-${run_id:}"},
    "sweep": {
        "dir": "multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}-${run_id:}",
        "subdir": "${hydra.job.num}",
    },
    "launcher": {},  # Hydra 1.4 compares it
    "sweeper": {"params": None},
    "job": {"name": "train"},
}
_UNUSED = ["output", "launcher", "sweeper", "help", "hydra_help", "hydra_logging", "job_logging", "env"]
"""Groups of Hydra of which hydraloop reads nothing: to compose their defaults would take half of the time."""


def register(store: ConfigStore) -> None:
    """Store `hydraloop` and `hydraloop/project`, one of which begins the defaults list in a config.yaml."""
    store.store(group="hydraloop", name="schema", package="_global_", node=Config)
    store.store(
        name="hydraloop",
        node={
            "defaults": [
                "/hydraloop/schema",
                *({f"override /hydra/{group}": None} for group in _UNUSED),
                "_self_",
            ],
            "hydra": HYDRA_SETTINGS,
        },
    )
    store.store(
        group="hydraloop",
        name="project",
        package="_global_",
        node={"defaults": ["/hydraloop", *_CHOICES, "_self_"]},
    )

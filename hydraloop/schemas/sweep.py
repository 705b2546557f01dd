"""Options of a sweep."""

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from omegaconf import OmegaConf

OBJECTIVES_OF_JOB = ("time", "memory")
"""Names in `sweep.objectives` that no validation reports."""


def open_mapping() -> Any:
    """Return a mapping that takes new keys from the command line without `+`."""
    return OmegaConf.create({}, flags={"struct": False})


@dataclass
class SweepConf:
    """How `-m` runs the jobs of a sweep. No effect on a single run."""

    resume: Optional[str] = None
    """`auto`: continue the newest sweep in `multirun/` with the same config. Or the directory of a sweep. Finished jobs
    are not run again. Null: a new sweep."""
    retry_failed: bool = False
    """Whether a resumed sweep runs its failed jobs again. False: most errors would repeat."""
    on_failure: str = "continue"
    """`continue`: the other jobs run after one has failed. `stop`: no further job starts. Continue, because the jobs
    of a sweep do not depend on each other."""
    max_retries: int = 0
    """How often a job that failed or was killed is started again; it continues from its newest checkpoint. 0: most
    errors would repeat. A job whose loss was NaN is not started again. A preempted job continues without a retry, if it
    has made progress."""
    max_workers: Optional[int] = None
    """Jobs that run at a time. Null: as many as the GPUs allow; without GPUs, 1; 32 in Slurm's queue; with Ray, as
    many as the cluster has room for."""
    gpus: Optional[List[int]] = None
    """Numbers of the GPUs that jobs may use, as in `cuda:0`. Null: all that are visible."""
    gpus_per_job: float = 1.0
    """GPUs of each job: a whole number, or a fraction (0.5: two jobs share a GPU). Without GPUs, only 1 is accepted.
    1: a run uses one unless it has several ranks."""
    executor: str = "pool"
    """What runs the jobs: `pool`, processes on this machine; `submitit`, jobs of Slurm; or `ray`, actors of Ray."""
    submitit: Dict[str, Any] = field(default_factory=open_mapping)
    """Parameters of submitit's AutoExecutor: `timeout_min`, the time limit of a job in minutes, is required;
    `slurm_partition`, `gpus_per_node`, `mem_gb`, … are not. A config file may
    only set time, partition, account, constraint, memory, CPUs, GPUs and nodes. Empty: Slurm."""
    ray: Dict[str, Any] = field(default_factory=open_mapping)
    """What each job reserves in Ray: `num_cpus`, `num_gpus` (0.5: two jobs share a GPU) and `memory`, in bytes.
    `address` (`auto`: the cluster of this machine) and `runtime_env` must be typed. Empty: a CPU for each rank and, if
    the cluster has GPUs, a GPU; the cluster in `RAY_ADDRESS`, otherwise Ray is started on this machine."""
    zip: List[Any] = field(default_factory=list)
    """Keys whose axes advance together: `[[optimizer.lr,engine.max_epochs]]`. The axes have equal length. Empty: every
    combination is a job."""
    jobs: Optional[str] = None
    """A text file with the overrides of one job in each line. The axes multiply these jobs. Null: none."""
    average: str = "seed"
    """The swept key over which results are averaged. Seed: the key that changes nothing but chance."""
    report: bool = False
    """Whether the sweep writes `report.html` when it ends, as `hydraloop report` does. False: that takes some
    seconds, and needs plotly."""
    trials: Optional[int] = None
    """Trials of a search: the sweep chooses the values of its keys by the results of earlier jobs. It counts all
    trials, also those of a resumed search. `interval(1e-4,1e-1)`, `tag(log,interval(…))` and `int(interval(1,9))` are
    numbers between two ends. Null: a grid."""
    sampler: Any = "tpe"
    """What chooses the values: `tpe`, `random`, `nsga2`, `gp`, or a sampler of Optuna as
    `{_target_: my_project.MySampler}`. TPE: it is good for 10 to 1,000 trials, numbers, choices and conditions."""
    prune: Optional[str] = None
    """`median`: end jobs early whose validations are worse than those of other jobs. Null: each job trains to its
    end."""
    prune_after: Optional[int] = None
    """Validations of a job before `prune` may end it. Null: a quarter of those planned, at least 1, because early
    values say little about the last ones."""
    promote: Optional[str] = None
    """`asha`: a job pauses at each rung, and the best third of a rung continues. Null: each job trains to its end."""
    rung: int = 1
    """Validations until the first rung of `promote`; each further rung is three times as long. 1: the earliest
    comparison there is, usually after an epoch."""
    objectives: Dict[str, str] = field(default_factory=open_mapping)
    """Metrics to optimize, each `max` or `min`: `{accuracy: max, time: min}`, at the best validation. `time` is the
    seconds of a job, `memory` the most MiB in its records. Several give a Pareto front. Empty: the objective of each
    run."""
    enqueue: List[Any] = field(default_factory=list)
    """Trials that are run first: `[{optimizer.lr: 1e-3}]`. Keys that are left out are chosen by the sampler. Empty:
    none."""

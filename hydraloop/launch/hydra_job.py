"""A run or a job as Hydra would have it: values of `${hydra:…}`, a log file, and records of the config in `.hydra/`."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf, read_write

from hydraloop.files import console
from hydraloop.files.attempts import RECORDS
from hydraloop.files.config_yaml import dumped, remember_config
from hydraloop.files.secrets import masked
from hydraloop.launch.plan import RunPlan

LOG = "train.log"


def begin(cfg: DictConfig, plan: RunPlan) -> None:
    """Make the directory of a run, log into it from now on, and record the config, with secrets masked.

    Args:
        cfg: of the plan, with the node `hydra`.
    """
    settle(cfg, plan)
    folder = plan.attempt or plan.run_dir / RECORDS
    folder.mkdir(parents=True, exist_ok=True)
    remember_config(plan.cfg)
    console.set_up(cfg.hydra.verbose, plan.run_dir / LOG)
    config: Any = masked(OmegaConf.to_container(cfg, resolve=False, enum_to_str=True))
    hydra = config.pop("hydra")
    for name, record in {"config": config, "hydra": {"hydra": hydra}, "overrides": hydra["overrides"]["task"]}.items():
        (folder / f"{name}.yaml").write_text(dumped(record), encoding="utf-8")


def settle(cfg: DictConfig, plan: RunPlan) -> None:
    """Let interpolations of `${hydra:…}` in the config of a plan resolve as in the run. `cfg` is as of `begin`."""
    with read_write(cfg.hydra):
        cfg.hydra.runtime.output_dir = str(plan.run_dir)
    OmegaConf.copy_cache(from_config=cfg, to_config=plan.cfg)

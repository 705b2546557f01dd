"""A job as Hydra runs it: its logging, records and callbacks. Secrets in the records are masked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext
from pathlib import Path

from hydra._internal.callbacks import Callbacks  # Hydra's callbacks; only `hydra.main` itself makes them otherwise
from hydra.core.utils import JobReturn, JobStatus, env_override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from hydraloop.cli.console import prepare_handlers
from hydraloop.plan import RunPlan
from hydraloop.run_files.config_yaml import dumped, remember_config
from hydraloop.safety import hydra_versions
from hydraloop.safety.secrets import masked


@contextmanager
def as_job(cfg: DictConfig, plan: RunPlan, name: str | None = None) -> Iterator[JobReturn]:
    """In the body, this process is a job of Hydra: it has logging, records and callbacks. The body sets `return_value`.

    A composer has to be open, and interpolations of `${hydra:…}` resolve. Hydra's own `run_job` takes 20 ms more.

    Args:
        cfg: with the node `hydra`.
        plan: of the job.
        name: of the primary config, for a single run. None: a job of a sweep.
    """
    settings, run_dir = cfg.hydra, plan.run_dir
    settle(cfg, plan, name)
    returned = JobReturn(list(settings.overrides.task), plan.cfg, cfg, os.getcwd(), settings.job.name, JobStatus.FAILED)
    with hydra_versions.allowing():
        if name is not None:
            hydra_versions.configure_log(settings.hydra_logging, settings.verbose)
        callbacks = Callbacks(cfg)
        if name is not None:
            callbacks.on_run_start(config=cfg, config_name=name)
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            with surrounded(settings, run_dir):
                yield from _job(cfg, plan, callbacks, returned)
        finally:
            if name is not None:
                callbacks.on_run_end(config=cfg, config_name=name, job_return=returned)


def settle(cfg: DictConfig, plan: RunPlan, name: str | None = None) -> None:
    """Let interpolations of `${hydra:…}` resolve as in the job. The arguments are those of `as_job`."""
    settings = cfg.hydra
    with read_write(settings):
        settings.mode = RunMode.MULTIRUN if name is None else RunMode.RUN
        settings.runtime.output_dir = str(plan.run_dir)
        if plan.attempt is not None:
            settings.output_subdir = str(plan.attempt.relative_to(plan.run_dir))
    OmegaConf.copy_cache(from_config=cfg, to_config=plan.cfg)


@contextmanager
def surrounded(settings: DictConfig, run_dir: Path) -> Iterator[None]:
    """In the body, the working directory and the environment variables are those of a job with these settings."""
    with chdir(run_dir) if settings.job.chdir else nullcontext(), env_override(settings.job.env_set):
        yield


def _job(cfg: DictConfig, plan: RunPlan, callbacks: Callbacks, returned: JobReturn) -> Iterator[JobReturn]:
    """Yield once, and note in `returned` how the job has ended."""
    remember_config(plan.cfg)
    hydra_versions.configure_log(cfg.hydra.job_logging, cfg.hydra.verbose)
    prepare_handlers()
    _write_records(cfg, plan.run_dir)
    callbacks.on_job_start(config=cfg, task_function=lambda task: None)
    try:
        yield returned
        returned.status = JobStatus.COMPLETED
    except Exception as error:
        returned.return_value = error
        raise
    finally:
        callbacks.on_job_end(config=cfg, job_return=returned)


def _write_records(cfg: DictConfig, run_dir: Path) -> None:
    """Write what Hydra records of a job, with secrets masked."""
    if cfg.hydra.output_subdir is None:
        return
    folder = run_dir / cfg.hydra.output_subdir
    folder.mkdir(parents=True, exist_ok=True)
    config = masked(OmegaConf.to_container(cfg, resolve=False, enum_to_str=True))
    hydra = config.pop("hydra")
    records = {"config": config, "hydra": {"hydra": hydra}, "overrides": hydra["overrides"]["task"]}
    for name, record in records.items():
        (folder / f"{name}.yaml").write_text(dumped(record), encoding="utf-8")

"""Let Hydra run a sweep or show a config. Errors are raised, and secrets in Hydra's records are masked."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from hydra.types import RunMode
from omegaconf import DictConfig

from hydraloop.cli.console import end_with_reader, prepare_handlers
from hydraloop.errors import UserError
from hydraloop.run_files.config_yaml import mask_files, remember_config
from hydraloop.safety import hydra_versions
from hydraloop.safety.secrets import mask_text

FULL_ERROR = "HYDRA_FULL_ERROR"

Job = Callable[[DictConfig, Path], Any]
"""What Hydra runs: it gets the config, without the node `hydra`, and the run directory."""


def run_sweep(job: Job, argv: Sequence[str], folder: Path, name: str) -> None:
    """Let Hydra run the jobs of a sweep, with the config files in `folder`. Raises the error of a job."""
    before, sys.argv = sys.argv, [sys.argv[0], *argv]  # which Hydra reads
    try:
        with env_override(
            {FULL_ERROR: "1"}
        ):  # errors are raised; else Hydra prints them without their traceback and exits
            hydra.main(config_path=str(folder), config_name=name, **hydra_versions.main_options())(_masked(job))()
    finally:
        sys.argv = before


def show(argv: Sequence[str], folder: Path, name: str) -> None:
    """Let Hydra show what a command line asks for, with secrets masked. Nothing is trained.

    The arguments are those of `run_sweep`.

    Raises:
        UserError: the flags do not go together.
    """
    end_with_reader()
    try:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            run_sweep(lambda cfg, run_dir: None, argv, folder, name)
    except ValueError as error:
        raise UserError(str(error), key=argv[0], remedy="Leave one of the flags out.") from error
    print(mask_text(shown.getvalue()), end="")


def sweep_dir() -> Path:
    """Return the directory of the sweep that is running, also from within a job's (`hydra.job.chdir=true`)."""
    settings = HydraConfig.get()
    return Path(settings.runtime.cwd, settings.sweep.dir)


def _masked(job: Job) -> Callable[[DictConfig], Any]:
    """Return the job with its secrets masked: in the files that Hydra has written, and in all log messages."""

    def run(cfg: DictConfig) -> Any:
        settings = HydraConfig.get()
        run_dir = Path(settings.runtime.output_dir)
        remember_config(cfg)
        prepare_handlers()
        if settings.output_subdir is not None:
            mask_files((run_dir / settings.output_subdir).glob("*.yaml"))
        if settings.mode is RunMode.MULTIRUN:
            mask_files([sweep_dir() / "multirun.yaml"])
        return job(cfg, run_dir)

    return run

"""The trackers of a sweep, as its controller sees them: one parent run, which the jobs' runs are children of.

The controller does nothing itself: a process of its own makes the database and the parent run before the first job
starts, and another one tells the parent how the jobs ended. Without torch.
"""

from __future__ import annotations

import json
import logging
import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from omegaconf import DictConfig, OmegaConf

from hydraloop.masking import mask_text, masked
from hydraloop.tracking import description
from hydraloop.tracking.locks import FOLDER
from hydraloop.tracking.spawning import spawn
from hydraloop.tracking.tracker import Sweep

log = logging.getLogger(__name__)

_KINDS = {"MLflowLoggerHook": "mlflow", "WandbLoggerHook": "wandb", "TensorBoardLoggerHook": "tensorboard"}
_WITH_PARENT = ("mlflow",)
"""W&B has groups, TensorBoard has folders: the jobs name them themselves."""
_OURS = ("_target_", "priority", "on_error")
_PATIENCE = 60.0
"""Seconds for a new database: its tables take some 5 s on a fast disk, and each job would have to wait for them."""


@dataclass
class SweepTrackers:
    """What the jobs of one command line are tracked by."""

    axes: list[str] = field(default_factory=list)
    """Keys that are swept."""
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name of the hook, in whatever job: `kind`, `options` and `experiment`."""
    folder: Path | None = None
    """Of the sweep, once it has begun."""

    def see(self, cfg: DictConfig) -> None:
        """Look at the config of a job."""
        for group in ("default_hooks", "hooks"):
            for name, node in cfg[group].items():
                kind = None if node is None else _KINDS.get(str(node.get("_target_")).rpartition(".")[2])
                if kind is not None:
                    options = cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))
                    options = {key: value for key, value in options.items() if key not in _OURS}
                    options["folder"] = str(Path.cwd())  # of what is relative, for `sync.py` typed elsewhere
                    given = {"kind": kind, "options": options, "experiment": cfg.experiment_name}
                    self.found.setdefault(str(name), given)

    def begin(self, folder: Path) -> None:
        """Before the first job: let the jobs find the sweep, and make what they share."""
        if not self.found:
            return
        self.folder = folder.absolute()
        name = f"{folder.parent.name}/{folder.name}" if folder.parent.name[:4].isdigit() else folder.name
        description.write_sweep(Sweep(self.folder, secrets.token_hex(8), name, 0, tuple(self.axes)))
        for hook, given in self.found.items():
            if given["kind"] in _WITH_PARENT:
                _tell("begin", self.folder, hook, given, _PATIENCE)

    def end(self) -> None:
        """Behind the last job: tell the parent runs."""
        if self.folder is None:
            return
        for hook, given in self.found.items():
            if given["kind"] in _WITH_PARENT:
                _tell("end", self.folder, hook, given, float(given["options"].get("flush_timeout", 10.0)) + _IMPORTS)


_IMPORTS = 5.0
"""Seconds more than `flush_timeout`: the process imports its library first."""


def _tell(what: Literal["begin", "end"], folder: Path, hook: str, given: Mapping[str, Any], patience: float) -> None:
    """Run `parent.py`; whatever happens there, the sweep goes on."""
    message = json.dumps({**given, "masked": masked(dict(given["options"]))})
    problem = ""
    try:
        process = spawn("hydraloop.tracking.parent", what, str(folder), hook, errors=folder / FOLDER / f"{hook}.log")
        with process:
            try:
                said, _ = process.communicate(message.encode(), timeout=patience)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            problem = said.decode("utf-8", "replace").strip() or f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        problem = f"no answer within {patience:g} s"
    except OSError as error:
        problem = str(error)
    if problem:
        later = "each job tries by itself" if what == "begin" else "sync.py tells it later"
        log.warning("%s: the sweep's parent run: %s; %s", hook, mask_text(problem), later)

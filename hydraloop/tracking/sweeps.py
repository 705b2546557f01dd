"""The trackers of a sweep, as its controller sees them: one parent run, which the jobs' runs are children of.

The controller does nothing itself: a process of its own makes the database and the parent run before the first job
starts, and another one tells the parent how the jobs ended. Without torch.
"""

from __future__ import annotations

import json
import logging
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydraloop.safety.secrets import mask_text, masked, remember
from hydraloop.tracking import description
from hydraloop.tracking.follower.locks import FOLDER
from hydraloop.tracking.follower.spawning import spawn
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
    """By name of the hook, in whatever job: `kind`; with a parent run also `options`, `experiment` and `jobs`."""
    unknown: dict[str, list[str]] = field(default_factory=dict)
    """By name of the hook: options, or `experiment_name`, that are only known in a job (`${hydra:job.num}`)."""
    interrupted: bool = False
    """Whether the jobs were."""
    folder: Path | None = None
    """Of the sweep, once it has begun."""

    def see(self, cfg: DictConfig) -> None:
        """Look at the config of a job; `${hydra:…}` is not known before it runs."""
        for group in ("default_hooks", "hooks"):
            for name, node in cfg[group].items():
                kind = None if node is None else _KINDS.get(str(node.get("_target_")).rpartition(".")[2])
                if kind is not None and str(name) not in self.found:
                    self.found[str(name)] = {"kind": kind}
                    if kind in _WITH_PARENT:
                        self._look(str(name), node, cfg)
                if kind in _WITH_PARENT:
                    self.found[str(name)]["jobs"] = self.found[str(name)].get("jobs", 0) + 1

    def _look(self, hook: str, node: DictConfig, cfg: DictConfig) -> None:
        options, unknown = _resolved(node, [str(key) for key in node if key not in _OURS])
        options["folder"] = str(Path.cwd())  # of what is relative, for `sync.py` typed elsewhere
        rest, also = _resolved(cfg, ["experiment_name"])
        self.found[hook] |= {"options": options, "experiment": mask_text(str(rest.get("experiment_name")))}
        if unknown or also:
            self.unknown[hook] = [*unknown, *also]

    def begin(self, folder: Path) -> None:
        """Before the first job: let the jobs find the sweep, and make what they share."""
        if not self.found:
            return
        self.folder = folder.absolute()
        name = f"{folder.parent.name}/{folder.name}" if folder.parent.name[:4].isdigit() else folder.name
        description.write_sweep(Sweep(self.folder, secrets.token_hex(8), name, 0, tuple(self.axes)))
        for hook, given in self.found.items():
            if hook in self.unknown:
                log.warning("%s: its parent run is left to the jobs, which alone know %s", hook, self.unknown[hook][0])
            elif given["kind"] in _WITH_PARENT:
                _tell("begin", self.folder, hook, given, _PATIENCE)

    def end(self) -> None:
        """Behind the last job: tell the parent runs."""
        if self.folder is None:
            return
        for hook, given in self.found.items():
            if given["kind"] in _WITH_PARENT and not set(_ADDRESS).intersection(self.unknown.get(hook, [])):
                given["interrupted"] = self.interrupted
                patience = float(given["options"].get("flush_timeout") or 0.0) + _IMPORTS
                _tell("end", self.folder, hook, given, patience)


_IMPORTS = 5.0
"""Seconds more than `flush_timeout`: the process imports its library first."""
_ADDRESS = ("tracking_uri",)
"""Options without which nobody knows where the parent run is."""


def _resolved(node: DictConfig, keys: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """What there is under some keys, as plain values, and the keys whose values do not resolve here."""
    found: dict[str, Any] = {}
    unknown = []
    for key in keys:
        try:
            value = node[key]
            plain = OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value
        except OmegaConfBaseException:
            unknown.append(key)
        else:
            found[key] = plain
    return found, unknown


def _tell(what: Literal["begin", "end"], folder: Path, hook: str, given: Mapping[str, Any], patience: float) -> None:
    """Run `parent.py`; whatever happens there, the sweep goes on."""
    remember(given["options"])
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

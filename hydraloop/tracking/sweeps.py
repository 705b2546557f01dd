"""The trackers of a sweep: a parent run, whose children are the runs of the jobs. Does not import torch.

Separate processes do the work. One creates the database and the parent run before the first job starts, another one
tells the parent run how the jobs ended.
"""

from __future__ import annotations

import json
import logging
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydraloop.safety.secrets import mask_text, masked, remember
from hydraloop.tracking import description
from hydraloop.tracking.follower.locks import FOLDER
from hydraloop.tracking.follower.spawning import spawn
from hydraloop.tracking.tracker import Sweep, SweepEnding

log = logging.getLogger(__name__)

_KINDS = {"MLflowLoggerHook": "mlflow", "WandbLoggerHook": "wandb", "TensorBoardLoggerHook": "tensorboard"}
_WITH_PARENT = ("mlflow",)
"""W&B has groups and TensorBoard has folders instead, which the jobs name themselves."""
_OURS = ("_target_", "priority", "on_error")
_PATIENCE = 60.0
"""Seconds to create a database. Its tables take about 5 s on a fast disk, and each job would wait for them."""


@dataclass
class SweepTrackers:
    """The trackers of a sweep's jobs."""

    axes: list[str] = field(default_factory=list)
    """The swept keys."""
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name of the hook: `kind`; if it has a parent run, also `options`, `experiment` and the number of `jobs`."""
    unknown: dict[str, list[str]] = field(default_factory=dict)
    """By name of the hook: options, or `experiment_name`, whose values only a job knows (`${hydra:job.num}`)."""
    ended: SweepEnding = "finished"
    """How the sweep has ended."""
    folder: Path | None = None
    """Directory of the sweep; None until it begins."""
    jobs: int = 0
    """Number of jobs."""

    def see(self, cfg: DictConfig) -> None:
        """Add the trackers of a job's config. Values of `${hydra:…}` are unknown until the job runs."""
        self.jobs += 1
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
        options["folder"] = str(Path.cwd())  # relative paths refer to it, also in a `sync.py` that runs elsewhere
        rest, also = _resolved(cfg, ["experiment_name"])
        self.found[hook] |= {"options": options, "experiment": mask_text(str(rest.get("experiment_name")))}
        if unknown or also:
            self.unknown[hook] = [*unknown, *also]

    def begin(self, folder: Path) -> None:
        """Mark the sweep's directory and create the parent runs. Called before the first job."""
        if not self.found:
            return
        self.folder = folder.absolute()
        name = f"{folder.parent.name}/{folder.name}" if folder.parent.name[:4].isdigit() else folder.name
        description.write_sweep(Sweep(self.folder, secrets.token_hex(8), name, 0, tuple(self.axes), self.jobs))
        for hook, given in self.found.items():
            if hook in self.unknown:
                log.warning("%s: the jobs create its parent run: only they know %s", hook, self.unknown[hook][0])
            elif given["kind"] in _WITH_PARENT:
                _tell("begin", self.folder, hook, given, _PATIENCE)

    def end(self) -> None:
        """Close the parent runs. Called after the last job."""
        sweep = None if self.folder is None else description.read_sweep(self.folder)
        if self.folder is None or sweep is None:
            return
        description.write_sweep(replace(sweep, ended=self.ended))
        for hook, given in self.found.items():
            if given["kind"] in _WITH_PARENT and not set(_ADDRESS).intersection(self.unknown.get(hook, [])):
                given["interrupted"] = self.ended == "interrupted"
                patience = float(given["options"].get("flush_timeout") or 0.0) + _IMPORTS
                _tell("end", self.folder, hook, given, patience)


_IMPORTS = 5.0
"""Seconds added to `flush_timeout`, because the process imports its library first."""
_ADDRESS = ("tracking_uri",)
"""Options that say where the parent run is."""


def _resolved(node: DictConfig, keys: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the plain values of some keys, and the keys whose values cannot be resolved here."""
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
    """Run `parent.py` and warn if it fails. The sweep continues in any case."""
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
        later = "each job tries again" if what == "begin" else "sync.py closes it later"
        log.warning("%s: the sweep's parent run: %s; %s", hook, mask_text(problem), later)

"""Job: what a rank needs to know of a run, as text. Does not import torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from hydraloop.run.config_yaml import check_no_secret, dumped, plain, resolved, resolved_but_secrets
from hydraloop.run.environment import command
from hydraloop.run.resume import Resumed, known_checkpoints, newest_checkpoint
from hydraloop.safety import typed_options as typed


@dataclass(frozen=True, slots=True)
class Job:
    """One composed run with its directory. All paths are absolute."""

    config: str
    """YAML with all interpolations resolved: `${hydra:…}` and `${now:}` mean nothing in another process."""
    run_dir: str
    checkpoint: str | None
    """Where the run continues; None for a new run."""
    known: list[str] = field(default_factory=list)
    """The `known_checkpoints` at the start. This job has written all other checkpoints of the run directory."""
    folders: list[str] = field(default_factory=list)
    """Folders whose Python files a config may name. Empty in a `public` job, as is `trusted`."""
    trusted: list[str] = field(default_factory=list)
    """Packages that a config may name."""
    typed: list[str] = field(default_factory=list)
    """Keys set on the command line."""
    logging: dict[str, Any] | None = None
    """Hydra's `job_logging`; None for Hydra's default."""
    verbose: bool | str | list[str] = False
    """Hydra's `verbose`."""
    sys_path: list[str] = field(default_factory=list)
    """Where the launching process looks for modules."""
    command: list[str] = field(default_factory=list)
    """The command that started the launching process, without overrides, for hints to the user."""

    @classmethod
    def of(cls, cfg: DictConfig, resumed: Resumed, *, folders: Iterable[Path], trusted: Iterable[str]) -> Self:
        """Make the job that Hydra runs now.

        Args:
            cfg: as composed, without the node `hydra`.
            resumed: its directory, and where it continues.

        Raises:
            UserError: an interpolation does not resolve.
        """
        assert resumed.run_dir is not None, "Hydra has made the directory"
        hydra: Any = HydraConfig.get()
        return cls(
            config=dumped(resolved(cfg)),
            run_dir=str(resumed.run_dir.absolute()),
            checkpoint=None if resumed.checkpoint is None else str(resumed.checkpoint.absolute()),
            known=known_checkpoints(resumed.run_dir),
            folders=[str(folder.resolve()) for folder in folders],
            trusted=list(trusted),
            typed=typed.keys(cfg),
            logging=plain(hydra.job_logging),
            verbose=plain(hydra.verbose),
            sys_path=[str(Path(entry).absolute()) if entry else str(Path.cwd()) for entry in sys.path],
            command=command(),
        )

    def public(self, cfg: DictConfig) -> Self:
        """Return the same job without secrets, and without what a config may name: others can read it, and change it.

        Args:
            cfg: as given to `of`.

        Raises:
            UserError: a secret is not in the environment.
        """
        config = resolved_but_secrets(cfg)
        check_no_secret(OmegaConf.create(config))
        return replace(self, config=dumped(config), folders=[], trusted=[], logging=None, sys_path=[], command=[])

    def resumed(self) -> Resumed:
        """Return the run directory, and where the run continues."""
        return Resumed(Path(self.run_dir), None if self.checkpoint is None else Path(self.checkpoint))

    def restarted(self) -> Self:
        """Return the same job, continued from the newest checkpoint that it has written, if any."""
        newest = newest_checkpoint(Path(self.run_dir), known=self.known)
        return self if newest is None else replace(self, checkpoint=str(newest.absolute()))

    def to_json(self) -> str:
        """Return one line of text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the job that `to_json` wrote."""
        return cls(**json.loads(text))

"""Job: what a rank gets to know of a run, as text. Without torch."""

from __future__ import annotations

import json
import multiprocessing.spawn
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from hydraloop.run.config_yaml import plain, resolved_yaml
from hydraloop.run.directory import Resumed
from hydraloop.safety import typed_options as typed

_MAIN = ("init_main_from_name", "init_main_from_path")


@dataclass(frozen=True, slots=True)
class Job:
    """One run, composed and settled. All paths are absolute."""

    config: str
    """YAML; every interpolation resolved, since `${hydra:…}` and `${now:}` mean nothing in another process."""
    run_dir: str
    checkpoint: str | None
    """To go on from; None: the run is new."""
    began: float
    """When the job was begun, in seconds since 1970: checkpoints after that are its own."""
    folders: list[str] = field(default_factory=list)
    """Whose Python files a config may name."""
    trusted: list[str] = field(default_factory=list)
    """Packages that a config may name."""
    typed: list[str] = field(default_factory=list)
    """The keys that were typed on the command line."""
    logging: dict[str, Any] | None = None
    """Hydra's `job_logging`; None: Hydra's own default."""
    verbose: bool | str | list[str] = False
    """Hydra's `verbose`."""
    sys_path: list[str] = field(default_factory=list)
    """Where the launching process looks for modules."""
    script: str | None = None
    """The launching process's main file, which hints to the user name; None: it has none."""
    main: dict[str, str] = field(default_factory=dict)
    """How to import the launching process's main module; empty where the config names nothing in it."""

    @classmethod
    def of(cls, cfg: DictConfig, resumed: Resumed, *, folders: Iterable[Path], trusted: Iterable[str]) -> Job:
        """The job that Hydra is running now.

        Args:
            cfg: as composed, without the node `hydra`.
            resumed: its directory, and where it goes on.

        Raises:
            UserError: an interpolation does not resolve.
        """
        assert resumed.run_dir is not None, "a job of Hydra's has a directory"
        config = resolved_yaml(cfg)
        hydra: Any = HydraConfig.get()
        return cls(
            config=config,
            run_dir=str(resumed.run_dir.absolute()),
            checkpoint=None if resumed.checkpoint is None else str(resumed.checkpoint.absolute()),
            began=time.time(),
            folders=[str(folder.resolve()) for folder in folders],
            trusted=list(trusted),
            typed=typed.keys(cfg),
            logging=plain(hydra.job_logging),
            verbose=plain(hydra.verbose),
            sys_path=[str(Path(entry).absolute()) if entry else str(Path.cwd()) for entry in sys.path],
            script=getattr(sys.modules["__main__"], "__file__", None),
            main=_main_module() if "_target_: __main__." in config else {},
        )

    def to_json(self) -> str:
        """The job as one line of text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Job:
        """The job that `to_json` wrote."""
        return cls(**json.loads(text))


def _main_module() -> dict[str, str]:
    """What multiprocessing's spawned processes are told, for the same purpose."""
    found: dict[str, Any] = multiprocessing.spawn.get_preparation_data("hydraloop")
    return {name: str(found[name]) for name in _MAIN if name in found}

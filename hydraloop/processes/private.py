"""Private: what ranks and jobs get beside the plan. It must not be in a file. Does not import torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from hydraloop.plan import RunPlan
from hydraloop.run_files.config_yaml import differing, plain, resolved, without_secrets
from hydraloop.run_files.environment import command
from hydraloop.safety.allowlist import ALLOWLIST, IN_MAIN

VARIABLE = "HYDRALOOP_PRIVATE"
"""The environment variable, which each process removes. `worker.py` reads it before it imports this file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Private:
    """What a rank or a job needs of the process that has started it."""

    sys_path: Sequence[str] = ()
    """Where that process looks for modules."""
    command: Sequence[str] = ()
    """The command that has started it, without overrides, for hints to the user."""
    folders: Sequence[str] = ()
    """Folders whose Python files a config may name."""
    trusted: Sequence[str] = ()
    """Packages that a config may name."""
    logging: dict[str, Any] | None = None
    """Hydra's `job_logging` of the plan, which is not in its text."""
    secrets: Sequence[tuple[Sequence[str | int], Any]] = ()
    """The values that the text of a plan or a request does not have, each with its place in it."""

    @classmethod
    def of(cls, plan: RunPlan) -> Self:
        """Return what the ranks need to train by a plan.

        Raises:
            UserError: an interpolation does not resolve.
        """
        return cls(
            sys_path=[str(Path(entry).absolute()) if entry else str(Path.cwd()) for entry in sys.path],
            command=command(),
            folders=ALLOWLIST.folders,
            trusted=ALLOWLIST.packages,
            logging=plain(plan.logging),
            secrets=list(differing(resolved(plan.cfg), without_secrets(plan.cfg))),
        )

    @classmethod
    def received(cls) -> Self:
        """Return what the environment of this process has."""
        return cls(**json.loads(os.environ.pop(VARIABLE, "{}")))

    def variables(self) -> dict[str, str]:
        """Return the environment variable."""
        return {VARIABLE: json.dumps(asdict(self))}

    def added_to(self, plan: RunPlan) -> RunPlan:
        """Return the plan with the secrets and the logging. Trust what it may name."""
        for folder in self.folders:
            ALLOWLIST.trust_folder(Path(folder))
        ALLOWLIST.trust(self.trusted)
        ALLOWLIST.advice = IN_MAIN
        self.put_back(plan.cfg)
        return replace(plan, logging=self.logging)

    def put_back(self, content: Any) -> None:
        """Give a config, or the content of a request, its secrets."""
        for (*parents, name), value in self.secrets:
            node = content
            for parent in parents:
                node = node[parent]
            node[name] = value

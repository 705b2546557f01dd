"""Secrets in the arguments of processes that this one starts: masked there, and in an environment variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from hydraloop.files.config_yaml import differing
from hydraloop.files.secrets import mask_overrides

_VARIABLE = "HYDRALOOP_PRIVATE"
"""The environment variable, which each process removes."""
RANK_JOB = "HYDRALOOP_RANK_JOB"
"""Variable with what a rank of a sweep's job has to know of the job, as JSON."""


@dataclass(frozen=True, slots=True)
class Private:
    """The secrets in lists of overrides."""

    secrets: Sequence[tuple[Sequence[str | int], Any]] = ()
    """The overrides that have a secret, each with its place."""

    @classmethod
    def received(cls) -> Self:
        """Return what the environment of this process has, and remove it there."""
        return cls(**json.loads(os.environ.pop(_VARIABLE, "{}")))

    def variables(self) -> dict[str, str]:
        """Return the environment variable."""
        return {_VARIABLE: json.dumps(asdict(self))}

    def put_back(self, content: Any) -> None:
        """Give the masked lists their secrets."""
        for (*parents, name), value in self.secrets:
            node = content
            for parent in parents:
                node = node[parent]
            node[name] = value


def masked_lists(overrides: Mapping[str, list[str]]) -> tuple[dict[str, list[str]], Private]:
    """Return lists of overrides with masked secrets, and the secrets."""
    shown = {name: mask_overrides(lines) for name, lines in overrides.items()}
    return shown, Private(list(differing(overrides, shown)))


def of_rank(arguments: Sequence[str]) -> tuple[list[str], Any]:
    """Return the arguments of this rank, which hydraloop has started, and its `RANK_JOB`; None for a single run."""
    content = {"arguments": list(arguments)}
    Private.received().put_back(content)
    return content["arguments"], json.loads(os.environ.pop(RANK_JOB, "null"))

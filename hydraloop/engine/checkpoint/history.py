"""The checkpoints of a run by iteration. Reads their positions, not their tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydraloop.engine.checkpoint.format import load
from hydraloop.errors import UserError
from hydraloop.run_files.checkpoint_files import candidates

log = logging.getLogger(__name__)

_NEEDED = {"meta", "progress", "rng", "optimizer", "schedulers", "hooks"}
"""Entries of a checkpoint from which a run continues to the last bit."""


class Saved(NamedTuple):
    """A checkpoint of a run."""

    iteration: int
    path: Path
    meta: Mapping[str, Any]


def history(folders: Sequence[Path]) -> list[Saved]:
    """Return the run's checkpoints, the newest first, without those of a part that the run has given up.

    Their tensors are not verified.
    """
    found = list(_read(candidates(*folders)))
    newest = found[0].iteration if found else 0
    kept: list[Saved] = []
    for one in sorted(found, key=lambda one: (one.meta["time"], one.iteration), reverse=True):
        if one.iteration <= newest:  # written before a `resume=` from an earlier file, if it is above
            kept.append(one)
            newest = one.iteration
    return kept


def _read(paths: Sequence[Path]) -> Iterator[Saved]:
    for path in paths:
        try:
            saved = load(path, mmap=True, only=())
            if saved.keys() >= _NEEDED:
                yield Saved(saved["progress"]["iteration"], path, saved["meta"])
        except UserError as error:
            log.warning("%s", error.problem)

"""Loads the class of a tracker by its dotted path, which a cursor file may hold. Does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from hydraloop.errors import UserError
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.tracking.tracker import Tracker

MLFLOW = "hydraloop.tracking.mlflow.tracker.MLflowTracker"
WANDB = "hydraloop.tracking.wandb.tracker.WandbTracker"
TENSORBOARD = "hydraloop.tracking.tensorboard.tracker.TensorBoardTracker"


def load_tracker(kind: str, *, folders: Sequence[str] = (), packages: Sequence[str] = ()) -> type[Tracker]:
    """Return a tracker class. Only hydraloop's own trackers and what the allowlist permits are imported.

    Args:
        kind: dotted path of the class.
        folders: trusted folders, in which the class is looked for first, as in the training process.
        packages: trusted packages.

    Raises:
        ValueError: the allowlist refuses the class, or it is not a tracker.
        Exception: raised by a module of the project while it is imported.
    """
    if kind in (MLFLOW, WANDB, TENSORBOARD):
        module, _, name = kind.rpartition(".")
        found = getattr(import_module(module), name)
    else:
        sys.path[:0] = [folder for folder in folders if folder not in sys.path[: len(folders)]]
        for folder in folders:
            ALLOWLIST.trust_folder(Path(folder))
        ALLOWLIST.trust(packages)
        try:
            found = ALLOWLIST.locate(kind, "kind")
        except UserError as error:
            raise ValueError(f"the tracker {kind!r} cannot be loaded: {error.problem}") from error
    if not isinstance(found, type) or not issubclass(found, Tracker):
        raise ValueError(f"{kind!r} is not a subclass of hydraloop.tracking.Tracker")
    return found

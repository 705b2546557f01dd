"""The trackers there are. A cursor names one of these, never a class: nothing else is imported for a file on disk."""

from __future__ import annotations

import logging
from importlib import import_module

from hydraloop.tracking.tracker import Tracker

log = logging.getLogger(__name__)

_LIBRARIES = {"mlflow": "mlflow", "wandb": "wandb", "tensorboard": "tensorboard.plugins.hparams.api_pb2"}
"""The module of each that takes its time."""


def tracker_of(kind: str) -> type[Tracker]:
    """The class of a kind of tracker; its library is imported when it opens.

    Raises:
        ValueError: there is no such kind.
    """
    if kind == "mlflow":
        from hydraloop.tracking.mlflow.tracker import MLflowTracker

        return MLflowTracker
    if kind == "wandb":
        from hydraloop.tracking.wandb.tracker import WandbTracker

        return WandbTracker
    if kind == "tensorboard":
        from hydraloop.tracking.tensorboard.tracker import TensorBoardTracker

        return TensorBoardTracker
    raise ValueError(f"there is no tracker {kind!r}")


def preload(kind: str) -> None:
    """Import a kind's class and its library, which takes seconds. One that is missing is missed when it opens."""
    tracker_of(kind)
    try:
        if kind == "wandb":
            from hydraloop.tracking.wandb.setup import prepare

            prepare()  # it reads the environment when it is imported
        import_module(_LIBRARIES[kind])
    except Exception as error:
        log.debug("%s cannot be imported", kind, exc_info=error)

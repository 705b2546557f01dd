"""The trackers by name. A cursor file holds one of these names, so a file on disk cannot import any other class."""

from __future__ import annotations

import logging
from importlib import import_module

from hydraloop.tracking.tracker import Tracker

log = logging.getLogger(__name__)

_LIBRARIES = {"mlflow": "mlflow", "wandb": "wandb", "tensorboard": "tensorboard.plugins.hparams.api_pb2"}
"""The modules of each library that take long to import."""


def tracker_of(kind: str) -> type[Tracker]:
    """Return the tracker class of a kind. It imports its library when it opens.

    Raises:
        ValueError: the kind does not exist.
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
    """Import a kind's class and its library, which takes seconds. A missing library is reported when it opens."""
    tracker_of(kind)
    try:
        if kind == "wandb":
            from hydraloop.tracking.wandb.setup import prepare

            prepare()  # wandb reads the environment when it is imported
        import_module(_LIBRARIES[kind])
    except Exception as error:
        log.debug("%s cannot be imported", kind, exc_info=error)

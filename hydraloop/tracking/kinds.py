"""The trackers there are. A cursor names one of these, never a class: nothing else is imported for a file on disk."""

from __future__ import annotations

from hydraloop.tracking.tracker import Tracker


def tracker_of(kind: str) -> type[Tracker]:
    """The class of a kind of tracker; its library is imported when it opens.

    Raises:
        ValueError: there is no such kind.
    """
    if kind == "mlflow":
        from hydraloop.tracking.mlflow import MLflowTracker

        return MLflowTracker
    if kind == "wandb":
        from hydraloop.tracking.wandb import WandbTracker

        return WandbTracker
    if kind == "tensorboard":
        from hydraloop.tracking.tensorboard import TensorBoardTracker

        return TensorBoardTracker
    raise ValueError(f"there is no tracker {kind!r}")

"""Precision of the forward and backward pass: a group, so that each one can have options of its own."""

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore


@dataclass
class FP32Conf:
    """Single precision everywhere: the reference every other precision is compared with."""

    name: str = "fp32"
    """The name of the precision."""


def register(store: ConfigStore) -> None:
    """Store the options of the group `precision`."""
    store.store(group="precision", name="fp32", package="precision", node=FP32Conf)

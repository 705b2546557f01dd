"""The entries of every record that say where in the run it belongs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hydraloop.engine.mount_points import Mode
from hydraloop.engine.progress import Progress
from hydraloop.errors import UserError
from hydraloop.run_files.record_log import NONFINITE, OBJECTS, STAMP

POSITION = ("mode", "epoch", "iteration")
"""The first entries."""
PLAIN = frozenset({float, int, str, bool, type(None)})
"""Types of nearly all values."""
RESERVED = (*POSITION, OBJECTS, NONFINITE, STAMP)
"""Names that no value of a record may have."""
NUMBERS = (
    *("loss", "grad_norm", "lr", "momentum", "eta", "time", "data_time", "samples_per_second", "memory"),
    "skipped",
)
"""Names of the numbers that the engine and its hooks put into the records of training."""


def position(progress: Progress, mode: Mode) -> dict[str, Any]:
    """Return the first entries of a record: `{"mode", "epoch", "iteration"}`. No host sync.

    `epoch` counts from 1 and includes the current one; `iteration` counts completed ones.
    """
    return {"mode": mode, "epoch": progress.epoch + (progress.batch_in_epoch > 0), "iteration": progress.iteration}


def plain(value: Any) -> Any:
    """Return a scalar of numpy or torch as a plain number; another value as it is.

    Host sync for a tensor on an accelerator.
    """
    return value.item() if getattr(value, "ndim", None) == 0 else value


def as_tensor(values: Any) -> Tensor:
    """Return a tensor without its graph, or a copy of an array or a list of numbers as a tensor."""
    if isinstance(values, Tensor):
        return values.detach()
    return torch.from_numpy(np.array(values, order="C"))  # a copy: torch takes no negative strides


def check_names(
    names: Iterable[str], *, key: str | None = None, remedy: str, reserved: Collection[str] = RESERVED
) -> None:
    """Reject names that records already use.

    Args:
        key: of the names in the config, for the error.

    Raises:
        UserError: a name is one of `reserved`.
    """
    for name in names:
        if name in reserved:
            raise UserError(
                f"every record already has an entry {name!r}",
                key=None if key is None else f"{key}.{name}",
                remedy=remedy,
            )

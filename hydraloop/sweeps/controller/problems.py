"""Why a controller starts no further job."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from hydraloop.errors import UserError


def unwritable(path: Path, why: str) -> UserError:
    """Return the problem that the state of a job of the sweep in `path` could not be written."""
    free = shutil.disk_usage(path).free / 1e6
    return UserError(
        f"the state of a job could not be written to {path}, where {free:.0f} MB are free: {why}",
        key="hydra.sweep.dir",
        remedy=f"Repair that, and continue the sweep: sweep.resume={shlex.quote(str(path))}",
    )


def undecided(error: OSError | UserError) -> UserError:
    """Return the problem that the source of the sweep cannot choose the next job."""
    return error if isinstance(error, UserError) else UserError(f"the next job cannot be chosen: {error}")

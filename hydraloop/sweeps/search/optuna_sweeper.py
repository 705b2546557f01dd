"""Hydra's plugin for Optuna, which needs Optuna 2: it is refused with the command that replaces it."""

from __future__ import annotations

from collections.abc import Sequence

from hydraloop.errors import UserError
from hydraloop.run_files import environment
from hydraloop.safety.secrets import mask_command

_RENAMED = {"hydra.sweeper.n_trials": "sweep.trials", "hydra.sweeper.n_jobs": "sweep.max_workers"}
_TRIALS = "sweep.trials=20"
"""The default of the plugin."""
_SAMPLERS = {"random": "random", "nsgaii": "nsga2"}
"""By the name in `hydra/sweeper/sampler`. Any other becomes the default, TPE."""
_OF_PLUGINS = ("hydra/sweeper", "hydra.sweeper", "hydra/launcher", "hydra.launcher")


def check(lines: Sequence[str]) -> None:
    """Refuse the plugin.

    Args:
        lines: overrides, as typed.

    Raises:
        UserError: they select it.
    """
    typed = [line.lstrip("+").partition("=") for line in lines]
    if not any(key == "hydra/sweeper" and value.startswith("optuna") for key, _, value in typed):
        return
    kept = []
    for line, (key, _, value) in zip(lines, typed, strict=True):
        if key in _RENAMED:
            kept.append(f"{_RENAMED[key]}={value}")
        elif key == "hydra/sweeper/sampler" and value in _SAMPLERS:
            kept.append(f"sweep.sampler={_SAMPLERS[value]}")
        elif key.startswith("hydra.sweeper.params.") or not key.startswith(_OF_PLUGINS):
            kept.append(line)
    if not any(line.startswith("sweep.trials=") for line in kept):
        kept.append(_TRIALS)
    command = mask_command([*environment.command(), "-m", *kept])
    raise UserError("the search is part of hydraloop", key="hydra/sweeper", remedy=f"Run: {command}")

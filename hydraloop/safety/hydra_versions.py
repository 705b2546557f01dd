"""Where Hydra 1.3 and 1.4 differ, in one place."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import hydra
from hydra.core.utils import configure_log as hydra_configure_log
from hydra.utils import instantiate as hydra_instantiate
from omegaconf import DictConfig, OmegaConf

IS_1_3 = hydra.__version__.startswith("1.3")

BASE: dict[str, Any] = {"version_base": "1.3"} if IS_1_3 else {}
"""What every way to start Hydra takes; 1.4 has removed it."""

_LOGGING = [
    "hydraloop.cli.console.ConsoleHandler",
    "hydraloop.cli.console.MaskingFormatter",
    *("logging.FileHandler", "logging.StreamHandler", "logging.handlers.*"),
]
"""What a logging section may name: ours, and the handlers of the standard library that people keep logs with."""


_CHECKED: set[str] = set()
"""What the allowlist has found in Hydra's own sections: callbacks and log handlers of the project."""


def allow(target: str, found: Any) -> None:
    """Let Hydra 1.4 make an object that the allowlist has checked.

    Args:
        target: what the config names.
        found: what that is.
    """
    _CHECKED.update((target, f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', target)}"))


def main_options() -> dict[str, Any]:
    """Keyword arguments of `hydra.main`; 1.4 also asks what Hydra's own sections may name."""
    return BASE if IS_1_3 else {"execution_whitelist": [*_LOGGING, *_CHECKED]}


def instantiate(node: Any, allowed: Sequence[str]) -> Any:
    """`hydra.utils.instantiate` with plain lists and dicts as arguments.

    Args:
        allowed: the targets in `node`, each of them checked by the allowlist before; 1.4 checks them again.
    """
    options: dict[str, Any] = {} if IS_1_3 else {"_execution_whitelist_": list(allowed)}
    return hydra_instantiate(node, _convert_="all", **options)


def failed_at(error: Exception) -> str | None:
    """The key of the node that `instantiate` could not build, if the error tells.

    Hydra 1.3 raises an error of its own, whose cause is what the constructor raised, and 1.4 adds a note to that.
    """
    found = re.search(r"full_key: (\S+)", "\n".join([str(error), *getattr(error, "__notes__", [])]))
    return found.group(1) if found else None


def configure_log(config: DictConfig | None, verbose: bool | str | list[str]) -> None:
    """Set up logging as Hydra does for a job; 1.4 also asks what it may name.

    Args:
        config: Hydra's `job_logging`; None: Hydra's own default.
        verbose: Hydra's `verbose`.
    """
    options: dict[str, Any] = {} if IS_1_3 else {"execution_whitelist": [*_LOGGING, *_CHECKED]}
    hydra_configure_log(
        cast(Any, config), OmegaConf.create(verbose) if isinstance(verbose, list) else verbose, **options
    )


def register_resolver(name: str, resolver: Callable[[], str]) -> None:
    """A resolver whose value is the same wherever it stands in one config. OmegaConf 2.4 has renamed the function."""
    register: Any = OmegaConf.register_new_resolver if IS_1_3 else OmegaConf.register_resolver
    register(name, resolver, use_cache=True, replace=True)

"""The differences between Hydra 1.3 and 1.4."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import hydra
from hydra.utils import instantiate as hydra_instantiate
from omegaconf import OmegaConf

IS_1_3 = hydra.__version__.startswith("1.3.")
"""Otherwise it is 1.4, also as a release candidate."""
BASE: dict[str, Any] = {"version_base": "1.3"} if IS_1_3 else {}
"""An argument of every function that starts Hydra; 1.4 has removed it."""


def instantiate(node: Any, allowed: Sequence[str]) -> Any:
    """Call `hydra.utils.instantiate`, with plain lists and dicts as arguments.

    Args:
        allowed: the targets in `node`, which have passed the allowlist. 1.4 allows no others.
    """
    node = copy.deepcopy(node)  # keeps the parent, for interpolations
    OmegaConf.set_readonly(node, False)
    OmegaConf.set_struct(node, False)
    node._convert_ = "all"  # with it as an argument, 1.3 is slower, and 1.4 takes the node without our changes
    return hydra_instantiate(node, **({} if IS_1_3 else {"_execution_whitelist_": list(allowed)}))


def failed_at(error: Exception) -> str | None:
    """Return the key of the node that `instantiate` could not build; None if the error does not say.

    Hydra 1.3 raises another error, whose cause is that of the constructor. 1.4 adds a note to the constructor's.
    """
    found = re.search(r"full_key: (\S+)", "\n".join([str(error), *getattr(error, "__notes__", [])]))
    return found.group(1) if found else None


def register_resolver(name: str, resolver: Callable[[], str]) -> None:
    """Register a resolver that has one value in a config. OmegaConf 2.4 has renamed the function."""
    register: Any = OmegaConf.register_new_resolver if IS_1_3 else OmegaConf.register_resolver
    register(name, resolver, use_cache=True, replace=True)

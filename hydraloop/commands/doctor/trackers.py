"""Tests whether the services of the selected trackers answer. None is waited for long."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from urllib.error import HTTPError
from urllib.request import urlopen

from omegaconf import DictConfig

from hydraloop.commands.check.findings import Finding
from hydraloop.hooks.shared.selected_hooks import HOOK_GROUPS
from hydraloop.tracking.mlflow.address import address_of, shown, sqlite_path
from hydraloop.tracking.tracker import UnusableError
from hydraloop.tracking.wandb import mode_of

_SECONDS = 4.0
"""How long a service may take to answer."""
_WANDB = "https://api.wandb.ai"
_REFUSED = (401, 403, 407)
"""HTTP status codes of a service that wants another password or key."""


def tests(cfg: DictConfig | None) -> dict[str, Callable[[], Finding]]:
    """Return a test for each selected tracker, by its name."""
    makers = {"MLflowLoggerHook": _mlflow, "WandbLoggerHook": _wandb}
    found: dict[str, Callable[[], Finding]] = {}
    for group in HOOK_GROUPS:
        for name, node in () if cfg is None else cfg[group].items():
            test = makers.get(str((node or {}).get("_target_")).rpartition(".")[2])
            if test is not None:
                found[name] = partial(test, f"{group}.{name}", node)
    return found or {"trackers": lambda: Finding("ok", "none is selected: hooks=mlflow or hooks=wandb adds one")}


def _mlflow(key: str, node: DictConfig) -> Finding:
    key, address = f"{key}.tracking_uri", address_of({"tracking_uri": node.tracking_uri})
    file = sqlite_path(address)
    if file is None:
        if address.startswith(("http:", "https:")):
            return _service("MLflow", f"{shown(address)}/health", key)
        return Finding("not judged", f"{shown(address)} is neither a database nor an address of HTTP")
    place = file if file.exists() else next(one for one in file.absolute().parents if one.is_dir())
    if os.access(place, os.W_OK):
        return Finding("ok", f"MLflow's database is {file}")
    return Finding("problem", f"{place} cannot be written", key, f"Use another one: {key}=sqlite:////path/to/mlflow.db")


def _wandb(key: str, node: DictConfig) -> Finding:
    try:
        mode = mode_of(node.init)
    except UnusableError as error:
        return Finding("problem", str(error), f"{key}.init", f"Run `wandb login`, or use +{key}.init.mode=offline.")
    if mode == "offline":
        return Finding("ok", "W&B is offline: files that `wandb sync` uploads")
    return _service("W&B", os.environ.get("WANDB_BASE_URL", _WANDB), key)


def _service(name: str, url: str, key: str) -> Finding:
    """Ask a service.

    Args:
        url: without user and password.
    """
    try:
        with urlopen(url, timeout=_SECONDS):  # the address is the user's
            answer = ""
    except HTTPError as error:
        answer = str(error.code) if error.code in _REFUSED else ""
    except (OSError, ValueError) as error:
        answer = str(getattr(error, "reason", error))
    if not answer:
        return Finding("ok", f"{name} answers at {url}")
    remedy = "Start it, or correct the address. A run trains without it, and `hydraloop sync` sends its records later."
    return Finding("problem", f"no {name} at {url}: {answer}", key, remedy)

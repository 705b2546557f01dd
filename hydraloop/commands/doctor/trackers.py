"""Tests whether the services of the selected trackers answer. All are asked at once, and none is waited for long."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from omegaconf import DictConfig

from hydraloop.commands.check.findings import Finding
from hydraloop.errors import UserError
from hydraloop.tracking.mlflow.address import address_of, shown, sqlite_path
from hydraloop.tracking.tracker import UnusableError
from hydraloop.tracking.wandb import mode_of
from hydraloop.validate import HOOK_GROUPS

_SECONDS = 4.0
"""How long a service may take to answer."""
_WANDB = "https://api.wandb.ai"
_REFUSED = (401, 403, 407)
"""HTTP status codes of a service that wants another password or key."""

Test = Callable[[], Finding]


class _Question:
    """Asks a service, in a thread that nothing waits for: the search for a name of a machine has no time limit.

    Args:
        url: without user and password.
    """

    def __init__(self, url: str) -> None:
        self.url, self.answer = url, "it has not answered"
        self._thread = Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            with urlopen(Request(self.url), timeout=_SECONDS) as reply:  # the address is the user's
                self.answer = str(reply.status)
        except HTTPError as error:
            self.answer = str(error.code)
        except (URLError, OSError, ValueError) as error:
            self.answer = str(getattr(error, "reason", error))

    def finding(self, key: str, name: str) -> Finding:
        """Wait for the answer."""
        self._thread.join(_SECONDS)
        if self.answer.isdecimal() and int(self.answer) not in _REFUSED:
            return Finding("ok", f"{name} answers at {self.url}")
        remedy = (
            "Start it, or correct the address. A run trains without it, and `hydraloop sync` sends its records later."
        )
        return Finding("problem", f"no {name} at {self.url}: {self.answer}", key, remedy)


def tests(cfg: DictConfig | None) -> Iterator[tuple[str, Test]]:
    """Yield a test for each selected tracker, with its name, after asking all services."""
    nodes = {
        f"{group}.{name}": node
        for group in HOOK_GROUPS
        for name, node in (() if cfg is None else cfg[group].items())
        if node is not None
    }
    makers = {"MLflowLoggerHook": _mlflow, "WandbLoggerHook": _wandb}
    found = []
    for key, node in nodes.items():
        make = makers.get(str(node.get("_target_")).rpartition(".")[2])
        if make is not None:
            found.append((key.rpartition(".")[2], make(key, node)))
    yield from found or [("trackers", lambda: Finding("ok", "none is selected: hooks=mlflow or hooks=wandb adds one"))]


def _mlflow(key: str, node: DictConfig) -> Test:
    address = address_of({"tracking_uri": node.tracking_uri}, {})
    file = sqlite_path(address)
    if file is not None:
        return partial(_file, file, f"{key}.tracking_uri")
    if address.startswith(("http:", "https:")):
        return partial(_Question(f"{shown(address)}/health").finding, f"{key}.tracking_uri", "MLflow")
    return lambda: Finding("not judged", f"{shown(address)} is neither a database nor an address of HTTP")


def _file(file: Path, key: str) -> Finding:
    folder = next(one for one in file.absolute().parents if one.is_dir())
    place = file if file.exists() else folder
    if os.access(place, os.W_OK):
        return Finding("ok", f"MLflow's database is {file}")
    return Finding("problem", f"{place} cannot be written", key, f"Use another one: {key}=sqlite:////path/to/mlflow.db")


def _wandb(key: str, node: DictConfig) -> Test:
    try:
        mode = mode_of(node.mode, None)
    except UnusableError as error:
        problem = UserError(str(error), key=f"{key}.mode", remedy="Run `wandb login`, or use mode=offline.")
        return lambda: Finding("problem", problem.problem, problem.key, problem.remedy)
    if mode == "offline":
        return lambda: Finding("ok", "W&B is offline: files that `wandb sync` uploads")
    return partial(_Question(os.environ.get("WANDB_BASE_URL", _WANDB)).finding, key, "W&B")

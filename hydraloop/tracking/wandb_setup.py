"""How a W&B run is made: its mode, its settings and its config, from the hook's options and the run."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from hydraloop.tracking.tracker import Run, UnusableError

if TYPE_CHECKING:
    from wandb import Settings

Mode = Literal["online", "offline", "disabled"]

_NAMES: dict[str, Mode] = {
    "online": "online",
    "run": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}
"""What W&B's own `WANDB_MODE` may say."""
_OF_ONE_RUN = (
    "RUN_ID",
    "RESUME",
    "RESUME_FROM",
    "FORK_FROM",
    "SWEEP_ID",
    "SWEEP_PARAM_PATH",
    "SERVICE",
    "LAUNCH",
    "DIR",
)
"""Variables, behind `WANDB_`, that would make one run of several jobs, or put its files elsewhere."""
_LONGEST = 128
"""Characters of a project's, group's or run's name at W&B."""
_NOT_IN_PROJECTS = str.maketrans(dict.fromkeys("/\\#?%:", "-"))
_SYNC_TIMEOUT = 60.0
"""Seconds to wait for the service to open a run, where nothing else waits."""
_FLUSH_INTERVAL = 2.0
"""Seconds after which W&B writes what it has to its file; its own default is 15."""


def prepare() -> None:
    """Take out of this process's environment what belongs to one run alone, and W&B's reports of its own errors.

    Before wandb is imported for the first time: it reads the environment once.
    """
    for name in _OF_ONE_RUN:
        os.environ.pop(f"WANDB_{name}", None)
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")


def mode_of(option: str) -> Mode:
    """The mode to use now: `auto` is `WANDB_MODE`, else online where a key is configured. Never asks for one.

    Raises:
        UnusableError: online, and there is no key.
    """
    name = _NAMES.get(os.environ.get("WANDB_MODE", "") if option == "auto" else option)
    if name == "disabled" or name == "offline":
        return name
    if has_key():
        return "online"
    if name == "online":
        raise UnusableError("W&B is to be online, and no API key is configured: `wandb login`, or WANDB_API_KEY")
    return "offline"


def has_key() -> bool:
    """Whether W&B would find an API key, in its variables, in netrc or in its settings."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb

    settings = wandb.setup().settings
    return bool(settings.api_key) or _in_netrc(urlsplit(str(settings.base_url)).netloc)


def _in_netrc(host: str) -> bool:
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path("~/.netrc"), Path("~/_netrc")]:
        try:
            found = netrc.netrc(path.expanduser()).authenticators(host)
        except (OSError, RuntimeError, netrc.NetrcParseError):
            continue
        if found is not None:
            return True
    return False


def settings_of(options: Mapping[str, Any], run: Run) -> Settings:
    """Everything explicit: no prompt, no terminal, no code, no git (the config has what may be told of it)."""
    import wandb

    sync = bool(options.get("_sync"))
    seconds = _SYNC_TIMEOUT if sync else max(1.0, options["flush_timeout"])
    wanted: dict[str, Any] = {
        "console": "off",
        "silent": True,
        "disable_git": True,
        "disable_code": True,
        "disable_job_creation": True,
        "save_code": False,
        "sagemaker_disable": True,
        "init_timeout": seconds,
        "finish_timeout": 0.0 if sync else seconds,
        "finish_timeout_raises": True,
        "x_transaction_log_flush_interval": _FLUSH_INTERVAL,
        "x_disable_stats": sync or not options["system_metrics"],
        "x_stats_pid": run.attempt.pid,
        "stop_fn": _go_on,
    }
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in wandb.Settings.model_fields})


def _go_on() -> None:
    """What the stop button of W&B's page does to the follower: nothing, records go on coming."""


def identity(options: Mapping[str, Any], run: Run, part: int) -> dict[str, Any]:
    """Names, group, tags and config, as `wandb.init` takes them."""
    name = options["name"] or run.name
    return {
        "project": options["project"] or run.experiment.translate(_NOT_IN_PROJECTS)[:_LONGEST],
        "entity": options["entity"],
        "group": (options["group"] or (run.name if run.sweep is None else run.sweep.name))[:_LONGEST],
        "job_type": options["job_type"],
        "tags": options["tags"],
        "notes": options["notes"],
        "name": _short(name, "" if part == 1 else f" (part {part})"),
        "config": config_of(run),
    }


def _short(name: str, end: str) -> str:
    return f"{name if len(name) + len(end) <= _LONGEST else name[: _LONGEST - len(end) - 1] + '…'}{end}"


def config_of(run: Run) -> dict[str, Any]:
    """The first attempt's config, nested, since W&B does not take dots in names; what others changed as `resume_<n>/…`.

    `hydraloop` has what else is known of the run: its uid, the command line, the commit, …
    """
    first = run.attempts[0]
    flat: dict[str, Any] = dict(first.params)
    current: dict[str, Any] = dict(first.params)
    for attempt in run.attempts[1:]:
        for name, value in attempt.params.items():
            if name not in current or current[name] != value:
                flat[f"resume_{attempt.number}/{name}"] = value
        current = dict(attempt.params)
    return {**nested(flat), "hydraloop": {"uid": run.uid, **first.tags}}


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1, "a.c.0": 2}` as `{"a": {"b": 1, "c": [2]}}`; a name that is in its own way stays as it is."""
    root: dict[str, Any] = {}
    for name, value in sorted(flat.items(), key=lambda item: item[0].count(".")):
        *parents, last = name.split(".")
        node: Any = root
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                break
        if isinstance(node, dict) and last not in node:
            node[last] = value
        else:
            root[name] = value
    return {name: _with_lists(node) for name, node in root.items()}


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    items = {name: _with_lists(item) for name, item in node.items()}
    return list(items.values()) if items and list(items) == [str(place) for place in range(len(items))] else items

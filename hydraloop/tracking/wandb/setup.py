"""Mode, settings and config of a W&B run, from the hook's options and the run."""

from __future__ import annotations

import netrc
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from hydraloop.safety.secrets import masked
from hydraloop.tracking.tracker import Run, Sweep, UnusableError, valid_utf8
from hydraloop.tracking.wandb.names import LONGEST, NOT_IN_PROJECTS, VARIABLES

if TYPE_CHECKING:
    from wandb import Settings

Mode = Literal["online", "offline"]

_NAMES: dict[str, Mode | Literal["disabled"]] = {
    "online": "online",
    "run": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}
"""Values of `WANDB_MODE`."""
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
"""Variables, after `WANDB_`, that would merge several jobs into one run, or put files elsewhere."""
_IN_PROJECTS = str.maketrans(dict.fromkeys(NOT_IN_PROJECTS, "-"))
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_SYNC_TIMEOUT = 60.0
"""Seconds to wait for the service to open a run in `sync.py`."""
_TIME_TO_UPLOAD = 0.8
"""Part of `flush_timeout` for uploading; the rest is for reporting what was not uploaded."""
_FLUSH_INTERVAL = 2.0
"""Seconds after which W&B writes to its file. Its default is 15."""


def prepare() -> None:
    """Remove from this process's environment what belongs to a single W&B run, and turn off W&B's error reports.

    Must be called before wandb is imported for the first time, because it reads the environment then.
    """
    for name in (*(f"WANDB_{name}" for name in _OF_ONE_RUN), *VARIABLES.values()):
        if name != VARIABLES["entity"]:  # like the key, it may be that of the user of `sync.py`
            os.environ.pop(name, None)
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")


def is_disabled(option: str) -> bool:
    """Return whether the option or `WANDB_MODE` disables W&B."""
    return _named(option) == "disabled"


def _named(option: str) -> Mode | Literal["disabled"] | None:
    return _NAMES.get(os.environ.get("WANDB_MODE", "") if option == "auto" else option)


def mode_of(option: str) -> Mode:
    """Return the mode to use now. `auto` is `WANDB_MODE`, else online if a key is configured. Never asks for a key.

    Raises:
        UnusableError: W&B is disabled, or the mode is online and there is no key.
    """
    name = _named(option)
    if name == "disabled":
        raise UnusableError("W&B is disabled, by hooks.wandb.mode or WANDB_MODE")
    if name == "offline":
        return name
    if has_key():
        return "online"
    if name == "online":
        raise UnusableError("W&B cannot be online without an API key: run `wandb login` or set WANDB_API_KEY")
    return "offline"


def has_key() -> bool:
    """Return whether W&B would find an API key in its variables, in netrc or in its settings."""
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
    """Return W&B's settings. It asks nothing, and does not collect terminal output, code or git state by itself."""
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
        "finish_timeout": 0.0 if sync else _TIME_TO_UPLOAD * seconds,
        "finish_timeout_raises": True,
        "x_transaction_log_flush_interval": _FLUSH_INTERVAL,
        "x_disable_stats": sync or not options["system_metrics"],
        "x_stats_pid": run.attempt.pid,
        "stop_fn": _go_on,
    }
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in wandb.Settings.model_fields})


def _go_on() -> None:
    """Called for the stop button of W&B's page, which must not stop the follower."""


def identity(options: Mapping[str, Any], run: Run, part: int) -> dict[str, Any]:
    """Return the names, group, tags and config as arguments of `wandb.init`, with secrets masked."""
    given = masked({key: _valid_utf8(options[key]) for key in VARIABLES})
    return {
        "project": given["project"] or valid_utf8(run.experiment).translate(_IN_PROJECTS)[:LONGEST],
        "entity": given["entity"],
        "group": given["group"] or (_short(run.name, "") if run.sweep is None else group_of(run.sweep)),
        "job_type": given["job_type"],
        "tags": given["tags"],
        "notes": given["notes"],
        "name": _short(given["name"] or run.name, "" if part == 1 else f" (part {part})"),
        "config": config_of(run),
    }


def group_of(sweep: Sweep) -> str:
    """Return the sweep's name, with a part of its random id if it does not contain a date."""
    return _short(sweep.name, "" if _DATE.search(sweep.name) else f" ({sweep.uid[:4]})")


def _short(name: str, end: str) -> str:
    shortened = name if len(name) + len(end) <= LONGEST else name[: LONGEST - len(end) - 1] + "…"
    return valid_utf8(shortened) + end


def _valid_utf8(value: Any) -> Any:
    if isinstance(value, list):
        return [_valid_utf8(item) for item in value]
    return valid_utf8(value) if isinstance(value, str) else value


def config_of(run: Run) -> dict[str, Any]:
    """Return the first attempt's config, nested, because W&B does not accept dots in names.

    What later attempts changed is named `resume_<n>/…`. `hydraloop` has the uid, the command, the commit, …
    """
    first = run.attempts[0]
    flat: dict[str, Any] = dict(first.params)
    current: dict[str, Any] = dict(first.params)
    for attempt in run.attempts[1:]:
        for name, value in attempt.params.items():
            if name not in current or current[name] != value:
                flat[f"resume_{attempt.number}/{name}"] = value
        current = dict(attempt.params)
    told = {valid_utf8(name): _valid_utf8(value) for name, value in flat.items()}
    tags = {name: valid_utf8(value) for name, value in first.tags.items()}
    return {**nested(told), "hydraloop": {"uid": run.uid, **tags}}


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn `{"a.b": 1, "a.c.0": 2}` into `{"a": {"b": 1, "c": [2]}}`. A name that conflicts with another is kept."""
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

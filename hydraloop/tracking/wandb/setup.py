"""Mode, settings, names and config of a W&B run, from the hook's options and the run."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from hydraloop.run.environment import git_remote
from hydraloop.safety.secrets import masked
from hydraloop.tracking.tracker import Run, UnusableError, valid_utf8
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
_OF_ONE_RUN = ("RUN_ID", "RESUME", "RESUME_FROM", "FORK_FROM", "SWEEP_ID", "SWEEP_PARAM_PATH", "SERVICE", "LAUNCH")
"""Variables, after `WANDB_`, that would merge several runs into one. An agent's run is an option of the tracker."""
_IN_PROJECTS = str.maketrans(dict.fromkeys(NOT_IN_PROJECTS, "-"))
_SYNC_TIMEOUT = 60.0
"""Seconds to wait for the service to open a run in `sync`."""
_TIME_TO_UPLOAD = 0.8
"""Part of `flush_timeout` for uploading; the rest is for reporting what was not uploaded."""
_FLUSH_INTERVAL = 2.0
"""Seconds after which W&B writes to its file. Its default is 15."""


def prepare(agent: Mapping[str, str]) -> None:
    """Remove from this process's environment what belongs to a single W&B run, and turn off W&B's error reports.

    Must be called before wandb is imported for the first time, because it reads the environment then.

    Args:
        agent: the run of a `wandb agent` (`agent_of`). W&B reads its id and its sweep only from the environment.
    """
    for name in (*(f"WANDB_{name}" for name in (*_OF_ONE_RUN, "DIR")), *VARIABLES.values()):
        if name != VARIABLES["entity"]:  # like the key, it may be that of the user of `sync`
            os.environ.pop(name, None)
    os.environ.update({f"WANDB_{name.upper()}": value for name, value in agent.items()})
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")


def is_disabled(option: str) -> bool:
    """Return whether the option or `WANDB_MODE` disables W&B."""
    return _named(option) == "disabled"


def _named(option: str) -> Mode | Literal["disabled"] | None:
    return _NAMES.get(os.environ.get("WANDB_MODE", "") if option == "auto" else option)


def mode_of(option: str, began: Mode | None) -> Mode:
    """Return the mode of a run: the one in which it began, else by the option. Never asks for a key.

    Args:
        option: the option `mode`; `auto` is `WANDB_MODE`, else online if a key is configured.
        began: the mode in which the run began; None for a new run.

    Raises:
        UnusableError: W&B is disabled, or a run that must be online cannot be.
    """
    name = _named(option)
    if name == "disabled":
        raise UnusableError("W&B is disabled, by hooks.wandb.mode or WANDB_MODE")
    if began == "offline" or (began is None and name == "offline"):
        return "offline"
    if began == "online" and name == "offline":
        raise UnusableError("this run is online at W&B and cannot continue offline: `python -m hydraloop sync` can")
    if _has_key():
        return "online"
    if began == "online" or name == "online":
        raise UnusableError("W&B cannot be online without an API key: run `wandb login` or set WANDB_API_KEY")
    return "offline"


def _has_key() -> bool:
    """Return whether W&B finds an API key in its variables, in netrc or in its settings. Does not ask for one."""
    import wandb
    from wandb.sdk.lib.wbauth import authenticate_session

    host = wandb.setup().settings.base_url
    return authenticate_session(host=host, source="hydraloop", prompt=False, update_session=False) is not None


def settings_of(options: Mapping[str, Any], run: Run, mode: Mode) -> Settings:
    """Return W&B's settings: command, program, host and commit of the run instead of this process's.

    W&B asks nothing, and does not collect terminal output, code or git state by itself.
    """
    import wandb

    sync = bool(options.get("_sync"))
    seconds = _SYNC_TIMEOUT if sync else max(1.0, options["flush_timeout"])
    tags = run.attempt.tags
    program, sys.argv[1:] = _program_of(tags.get("command", ""))  # W&B has no setting for the arguments
    return wandb.Settings(
        program=program,
        program_relpath=program,
        host=tags.get("host"),
        git_commit=tags.get("git_commit"),
        git_remote_url=None if sync else git_remote(Path.cwd()),
        console="off",
        silent=True,
        disable_git=True,
        disable_code=True,
        disable_job_creation=True,
        save_code=False,
        sagemaker_disable=True,
        init_timeout=seconds,
        finish_timeout=0.0 if sync else _TIME_TO_UPLOAD * seconds,
        finish_timeout_raises=True,
        # Offline, W&B's process does not write its own times into the summary. Online, this would turn on a server
        # feature.
        x_server_side_derived_summary=mode == "offline",
        x_transaction_log_flush_interval=_FLUSH_INTERVAL,
        x_disable_stats=sync or not options["system_metrics"],
        x_stats_pid=run.attempt.pid,
        stop_fn=_go_on,
    )


def _go_on() -> None:
    """Called for the stop button of W&B's page, which must not stop the follower."""


def _program_of(command: str) -> tuple[str | None, list[str]]:
    """Return program and arguments of `python train.py a=1` or `python -m package a=1`."""
    words = shlex.split(command)[1:]
    length = 2 if words[:1] == ["-m"] else 1
    return " ".join(words[:length]) or None, words[length:]


def agent_of(options: Mapping[str, Any], run: Run) -> dict[str, str]:
    """Return id and sweep of the run that a `wandb agent` has created for this run; empty if there is none.

    A job of hydraloop's own sweep does not use it, because all jobs would be the same W&B run.
    """
    return {} if run.sweep is not None else dict(options.get("agent") or {})


def identity(options: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Return the names, group, tags and config as arguments of `wandb.init`, with secrets masked."""
    given = masked(_as_json({key: options[key] for key in VARIABLES}))
    return {
        "project": given["project"] or valid_utf8(run.experiment).translate(_IN_PROJECTS)[:LONGEST],
        "entity": given["entity"],
        "group": given["group"] or (None if run.sweep is None else _short(run.sweep.name)),
        "job_type": given["job_type"],
        "tags": given["tags"],
        "notes": given["notes"],
        "name": _short(given["name"] or run.name),
        "config": config_of(run),
    }


def _short(name: str) -> str:
    return valid_utf8(name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…")


def config_of(run: Run) -> dict[str, Any]:
    """Return the first attempt's config. What later attempts changed is named `resume_<n>/optimizer/lr`.

    `hydraloop` has the uid, the command, the commit, …
    """
    first, *resumed = run.attempts
    config: dict[str, Any] = yaml.safe_load(first.config) or {}
    current = first.params
    for attempt in resumed:
        for name, value in attempt.params.items():
            if name not in current or current[name] != value:
                config[f"resume_{attempt.number}/{name.replace('.', '/')}"] = value  # W&B accepts no dots in names
        current = attempt.params
    found: dict[str, Any] = _as_json({**config, "hydraloop": {"uid": run.uid, **first.tags}})
    return found


def _as_json(value: Any) -> Any:
    """Return a value without surrogates, NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {valid_utf8(str(name)): _as_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return valid_utf8(value) if isinstance(value, str) else value

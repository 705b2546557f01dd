"""Mode, settings, names and config of a W&B run, from the hook's options and the run."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from hydraloop.run.environment import git_remote
from hydraloop.safety.secrets import masked
from hydraloop.tracking.tracker import Run, UnusableError

Mode = Literal["online", "offline"]

LONGEST = 128
"""Most characters of the name of a project, group, run or artifact at W&B."""
NAMES = {
    "project": "WANDB_PROJECT",
    "entity": "WANDB_ENTITY",
    "group": "WANDB_RUN_GROUP",
    "job_type": "WANDB_JOB_TYPE",
    "tags": "WANDB_TAGS",
    "notes": "WANDB_NOTES",
    "name": "WANDB_NAME",
}
"""Options that name a run, and W&B's variables. The hook reads these, because `sync` may run in another environment."""
_OF_ONE_RUN = ("RUN_ID", "RESUME", "RESUME_FROM", "FORK_FROM", "SWEEP_ID", "SWEEP_PARAM_PATH", "SERVICE", "LAUNCH")
"""Variables, after `WANDB_`, that would merge several runs into one. An agent's run is an option of the tracker."""
_NOT_IN_PROJECTS = str.maketrans(dict.fromkeys("/\\#?%:", "-"))
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
        agent: the run of a `wandb agent`: its variables, without `WANDB_`. W&B reads them only from the environment.
    """
    for name in (*(f"WANDB_{name}" for name in _OF_ONE_RUN), *NAMES.values()):
        if name != NAMES["entity"]:  # like the key, it may be that of the user of `sync`
            os.environ.pop(name, None)
    os.environ.update({f"WANDB_{name.upper()}": value for name, value in agent.items()})
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")


def chosen_mode(option: str) -> str:
    """Return the mode that the option or `WANDB_MODE` selects: `online`, `offline`, `disabled`, or `auto`."""
    name = os.environ.get("WANDB_MODE") or option if option == "auto" else option
    return {"run": "online", "dryrun": "offline"}.get(name, name)


def mode_of(option: str, began: Mode | None) -> Mode:
    """Return the mode of a run: the one in which it began, else by the option. Never asks for a key.

    Args:
        option: the option `mode`; `auto` is `WANDB_MODE`, else online if a key is configured.
        began: the mode in which the run began; None for a new run.

    Raises:
        UnusableError: W&B is disabled, or a run that must be online cannot be.
    """
    name = chosen_mode(option)
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
    """Return whether W&B finds an API key in its variables, in netrc or in its settings.

    `wandb.login`, its public function for this, asks for a key or raises.
    """
    import wandb
    from wandb.sdk.lib.wbauth import authenticate_session

    host = wandb.setup().settings.base_url
    return authenticate_session(host=host, source="hydraloop", prompt=False, update_session=False) is not None


def identity(options: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Return the names, group, tags and config as arguments of `wandb.init`, with secrets masked."""
    given = masked({key: options[key] for key in NAMES})
    group = given["group"] or ("" if run.sweep is None else run.sweep.name)
    names = {
        **given,
        "project": given["project"] or run.experiment.translate(_NOT_IN_PROJECTS)[:LONGEST],
        "group": group[:LONGEST] or None,
        "name": (given["name"] or run.name)[:LONGEST],
    }
    return {**_as_json(names), "config": config_of(run)}


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
    """Return a value without surrogates; NaN and infinity become text."""
    return json.loads(json.dumps(value, ensure_ascii=False, default=str).encode(errors="replace"), parse_constant=str)


def settings_of(options: Mapping[str, Any], run: Run, mode: Mode) -> Any:
    """Return W&B's settings: command, program, host and commit of the run instead of this process's.

    W&B asks nothing, and does not collect terminal output, code or git state by itself.
    """
    import wandb

    sync = bool(options.get("_sync"))
    seconds = _SYNC_TIMEOUT if sync else max(1.0, options["flush_timeout"])
    tags = run.attempt.tags
    words = shlex.split(tags.get("command", ""))[1:]  # `python train.py a=1` or `python -m package a=1`
    length = 2 if words[:1] == ["-m"] else 1
    program, sys.argv[1:] = " ".join(words[:length]) or None, words[length:]  # W&B has no setting for the arguments
    return wandb.Settings(
        program=program,
        program_relpath=program,
        host=tags.get("host"),
        git_commit=tags.get("git_commit"),
        git_remote_url=None if sync else git_remote(Path.cwd()),
        console="off",
        silent=True,
        disable_git=True,
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
        stop_fn=lambda: None,  # the stop button of W&B's page must not stop the follower
    )

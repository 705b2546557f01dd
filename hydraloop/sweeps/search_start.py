"""The start of a search, also after a kill: what its log says of the space and the settings."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hydraloop.cli.arguments import parse
from hydraloop.errors import UserError
from hydraloop.run_files.config_yaml import plain
from hydraloop.sweeps.search.sampler import make
from hydraloop.sweeps.search.settings import Settings
from hydraloop.sweeps.search.space import Params, Space, Value
from hydraloop.sweeps.search.trials import Trials
from hydraloop.sweeps.search_source import SearchSource
from hydraloop.sweeps.sweep_directory import SweepDirectory

_PATIENCE = 10.0
"""Seconds to wait for another process that decides. A decision takes less than one."""


def begin(directory: SweepDirectory, trials: Trials, settings: Settings, options: DictConfig) -> SearchSource:
    """Return the source of a search's jobs, after writing what has changed since its last start.

    Args:
        directory: of the sweep, locked by nobody.
        trials: not masked, with the log.
        settings: of this command line.
        options: `sweep.*`.

    Raises:
        UserError: the search had other settings, an enqueued trial is outside the space, or another process holds the
            log.
        OSError: the log cannot be written.
    """
    assert trials.log is not None
    make(settings.sampler, 0)  # refused now, not after the first job
    enqueued = [_point(trials.space, one) for one in options.enqueue]
    content: dict[str, Any] = {"event": "begin", "space": asdict(trials.space.masked()), "settings": settings.to_json()}
    content |= {"trials": trials.trials, "until": options.until}
    event = json.loads(json.dumps(plain(content)))  # as it was read
    with trials.log.deciding(patience=_PATIENCE) as decides:
        if not decides:
            remedy = "Look at it with `python -m hydraloop status`, or try again in a minute."
            raise UserError("another process of this search does not answer", key="sweep.resume", remedy=remedy)
        before = trials.log.begin
        settings.check_same(trials.log)
        if before != event:
            trials.log.append(event, flush=True)
    return SearchSource(directory, trials, settings, enqueued, options.until)


def _point(space: Space, given: Any) -> Params:
    """Return the values of an enqueued trial.

    Raises:
        UserError: it is no mapping, or one of the values is not in the space.
    """
    key = "sweep.enqueue"
    values = OmegaConf.to_container(given) if OmegaConf.is_dict(given) else None
    if not isinstance(values, dict):
        raise UserError("an entry is not a trial", key=key, remedy="Write 'sweep.enqueue=[{optimizer.lr: 1e-3}]'.")
    dimensions, found = {one.key: one for one in space.searched}, dict[str, Value]()
    for name, value in ((str(name), value) for name, value in values.items()):
        one = dimensions.get(name)
        if one is None:
            raise UserError(f"{name} is not searched", key=key, remedy=f"Use {', '.join(dimensions)}.")
        same = (choice for choice in one.choices if parse([f"{one.element}={choice}"])[0].value() == value)
        found[one.key] = one.read(next(same, str(value)), key=key)
    return found

"""Peers: what a rank and the other ranks tell each other before they train, and when they fail.

Each rank composes the config itself. Rank 0 makes the plan, and writes into the store that all ranks share where the
run is, what its `${now:}` and `${run_id:}` are, and a digest of each value of its config. The other ranks compare their
values. Secrets stay out of the store, because others on the network can read it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hydraloop.errors import PeerError, UserError
from hydraloop.files.checkpoint_to_resume import Find, newest_checkpoint
from hydraloop.files.config_yaml import resolved
from hydraloop.files.secrets import masked
from hydraloop.launch import elastic, torchrun
from hydraloop.launch.failure import Failure, Requeue
from hydraloop.launch.plan import RunPlan, resolve_output_dir
from hydraloop.launch.processes import leave, leave_before_unloading

_PLAN, _CAUSE, _MISTAKE, _RUN = "plan", "cause", "mistake", "run"
"""Keys in the store. The first two belong to one start, the others to the run with its restarts."""
_OF_RANK_0 = ("now", "run_id")
"""Resolvers whose values the other ranks take from rank 0."""
_POLL = 0.02


class Peers:
    """The other ranks, as one of several ranks sees them. For a single process, most methods do nothing."""

    def __init__(self) -> None:
        self._is_planned = False
        """Whether this rank has sent or read the plan."""
        self._is_told = False
        """Whether this rank has told its failure."""
        self._finished = leave_before_unloading() if torchrun.is_several() else None

    # Before the training. --------------------------------------------------------------------------------------------

    def lead(self, cfg: DictConfig, plan: RunPlan) -> RunPlan:
        """Send the plan to the other ranks, and wait until each has the same config. Called on rank 0.

        Args:
            cfg: of the plan, with the node `hydra`.

        Raises:
            UserError, RankError: another rank has another config, or an error.
        """
        if torchrun.is_launched():
            self.remember(plan)
        if not torchrun.is_several():
            return plan
        resolve_output_dir(cfg, plan)
        digests, caches = _digests(plan.cfg), (OmegaConf.get_cache(cfg), OmegaConf.get_cache(plan.cfg))
        told = {name: [entry for cache in caches for entry in cache.get(name, {}).items()] for name in _OF_RANK_0}
        paths = {"run_dir": plan.run_dir, "checkpoint": plan.checkpoint, "attempt": plan.attempt}
        content = {name: path and str(path.absolute()) for name, path in paths.items()}
        store = torchrun.of_this_start(torchrun.connect())
        store.set(_PLAN, json.dumps({**content, "told": told, "digests": digests}))
        self._is_planned = True
        others = [_agreed(rank) for rank in range(1, int(os.environ["WORLD_SIZE"]))]
        while not store.check(others):
            if store.check([_CAUSE]):
                raise Failure.from_json(store.get(_CAUSE)).error()
            time.sleep(_POLL)
        if torchrun.is_ours():
            elastic.Start.write(plan)
        return plan

    def follow(self, cfg: DictConfig, planned: Callable[[RunPlan], RunPlan]) -> RunPlan:
        """Wait for the plan of rank 0, and return it with the config of this rank.

        Args:
            cfg: with the node `hydra`.
            planned: completes the plan.

        Raises:
            PeerError: rank 0 has failed.
            UserError: this rank has another config.
        """
        store = torchrun.of_this_start(torchrun.connect())
        found = json.loads(store.get(_PLAN))
        self._is_planned = True
        if found is None:
            raise PeerError("rank 0 has no plan")
        paths: dict[str, Any] = {key: found[key] and Path(found[key]) for key in ("run_dir", "checkpoint", "attempt")}
        plan = planned(RunPlan(cfg=cfg, **paths))
        resolve_output_dir(cfg, plan)
        told = {key: {tuple(arguments): value for arguments, value in found["told"][key]} for key in _OF_RANK_0}
        for config in (cfg, plan.cfg):
            OmegaConf.set_cache(config, {**OmegaConf.get_cache(config), **told})
        own, theirs = _digests(plan.cfg), found["digests"]
        for key in {**theirs, **own}:
            if own.get(key) != theirs.get(key):
                raise UserError(
                    f"rank {torchrun.rank()} has another value than rank 0",
                    key=key,
                    remedy="Let config files, environment variables and resolvers give the same value on all machines.",
                )
        store.set(_agreed(torchrun.rank()), "")
        return plan

    def skip_plan(self) -> None:
        """Note that this rank neither leads nor follows: its command trains nothing."""
        self._is_planned = True

    # Errors, and the end. --------------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """Tell an error that ends this rank."""
        if torchrun.is_several() and not isinstance(error, Requeue):
            self.tell(Failure.of(error, torchrun.rank()))

    def tell(self, failure: Failure) -> None:
        """Tell the failure of this rank: by torch's error file to the launcher, and by the store to the other ranks.

        If there is no plan yet, rank 0 tells the other ranks that there will be none. Another rank waits until rank 0
        has come so far, because the launcher ends rank 0 when this rank has ended.
        """
        if self._is_told:
            return
        self._is_told = True
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            failure.write(Path(file))
        with suppress(RuntimeError, OSError):  # the process that keeps the store has ended
            store = torchrun.connect()
            own = torchrun.of_this_start(store)
            if failure.kind in ("mistake", "error"):
                own.compare_set(_CAUSE, "", failure.to_json())
            if failure.kind == "mistake" and torchrun.keeps_store():
                store.set(_MISTAKE, failure.to_json())
            if self._is_planned:
                return
            if torchrun.rank() == 0:
                own.set(_PLAN, json.dumps(None))
            else:
                own.get(_PLAN)

    def leave(self, code: int) -> None:
        """End this rank, when it has no more to do. Rank 0 of another launcher returns to the user's script.

        Args:
            code: the exit code. If it is not 0, this process ends at once.
        """
        if code:
            leave(code)
        if torchrun.reports():
            return
        assert self._finished is not None
        self._finished(0)
        sys.exit(0)

    # Restarts. -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """End a restarted rank if an earlier start has ended by a mistake, which would repeat, or by a signal."""
        if torchrun.is_ours() and torchrun.rank() == 0:
            elastic.Start.write()
        if not torchrun.attempt():
            return
        if elastic.is_stopped():
            leave(1)
        if torchrun.keeps_store() and (store := torchrun.connect()).check([_MISTAKE]):
            self._is_planned = True
            self.tell(Failure.from_json(store.get(_MISTAKE)))
            leave(1)

    def remember(self, plan: RunPlan) -> None:
        """Write to the launcher's store where a run starts, unless an earlier start has written it. See `earlier`."""
        if torchrun.keeps_store():
            start = None if plan.checkpoint is None else str(plan.checkpoint.absolute())
            content = json.dumps([str(plan.run_dir.absolute()), start, list(plan.known)])
            torchrun.connect().compare_set(_RUN, "", content)

    def earlier(self, resume: str | None) -> Find | None:
        """Return a function that finds where a run continues that was restarted; None for a run that starts.

        Args:
            resume: of the config. With `auto`, a run that the store does not know continues like any other.

        Raises:
            UserError: the launcher has kept no store over the restart.
        """
        if not torchrun.attempt() or (resume == "auto" and not torchrun.keeps_store()):
            return None
        if not torchrun.keeps_store():
            remedy = "Use --rdzv-backend=c10d, or leave it out and continue the run with resume=auto."
            raise UserError("torchrun keeps no store for restarted ranks", key="--max-restarts", remedy=remedy)
        store = torchrun.connect()
        if not store.check([_RUN]):  # the ranks failed before there was a run, or the node with the store was lost
            return None
        run_dir, start, known = json.loads(store.get(_RUN))

        def find(named: Path | None) -> tuple[Path, Path | None]:
            newest = newest_checkpoint(Path(run_dir), known=known)
            return Path(run_dir), newest or (Path(start) if start else None)

        return find


def _digests(cfg: DictConfig) -> dict[str, str]:
    """Return a digest of each resolved value, by its key. Secrets are masked."""
    values = masked(resolved(cfg))
    return {key: hashlib.sha256(repr(value).encode()).hexdigest()[:16] for key, value in _leaves(values)}


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
    for name, inner in items:
        yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    if not items:
        yield key, value


def _agreed(rank: int) -> str:
    return f"agreed-{rank}"

"""Searches that train nothing: four workers take the losses of a trial, epoch by epoch, from a table."""

from __future__ import annotations

import heapq
import importlib
import logging
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
from search_space import EPOCHS, Log, Table

WORKERS = 4
ETA = 3
RUNGS = (1, 3, 9)
TRIALS = 32
"""Trials of the random search whose best value is the target."""
STARTUP = 10
"""Trials that TPE draws at random first: its default."""


@dataclass
class Trial:
    """A trial of a search."""

    number: int
    config: int
    """Its row in the table."""
    losses: list[float] = field(default_factory=list)
    """Those of the epochs that it has trained."""
    state: Literal["running", "stopped", "complete", "failed"] = "running"
    """`stopped`: paused or pruned."""


class Search:
    """Random search. Subclasses choose configurations, or whether a trial continues.

    Args:
        table: the recorded curves.
        seed: of the draws. Equal for all searches, so that they draw the same configurations in the same order.
    """

    def __init__(self, table: Table, seed: int) -> None:
        self.table, self.seed = table, seed
        self.trials: list[Trial] = []
        self.order: list[int] = np.random.default_rng(seed).permutation(len(table.losses)).tolist()

    def next(self) -> Trial | None:
        """Return a trial to train on: a new one, or one to continue. None if a worker has to wait."""
        if len(self.trials) == len(self.order):
            return None
        self.trials.append(Trial(len(self.trials), self.choose()))
        return self.trials[-1]

    def choose(self) -> int:
        """Return the configuration of a new trial."""
        return self.order[len(self.trials)]

    def goes_on(self, trial: Trial) -> bool:
        """Return whether a trial trains another epoch now. Called after each epoch, unless it has diverged."""
        return len(trial.losses) < EPOCHS


def iterations_until(table: Table, search: Search, target: float) -> float:
    """Return the iterations of all workers until a complete trial reaches the target; infinity if it takes too long.

    The clock of a worker is the number of its iterations. Too long is the length of 64 complete trials.
    """
    spent, limit = 0, 2 * TRIALS * EPOCHS * float(np.mean(table.iterations))
    free = [0] * WORKERS  # the time since when a worker has no trial
    queue: list[tuple[int, int, Trial]] = []  # the time at which a trial ends its epoch, and its number
    while spent <= limit:
        while free and (begun := search.next()):
            begun.state = "running"
            heapq.heappush(queue, (free.pop() + table.iterations[begun.config], begun.number, begun))
        if not queue:
            break
        now, _, trial = heapq.heappop(queue)
        free = [now] * len(free)
        spent += table.iterations[trial.config]
        loss = float(table.losses[trial.config, len(trial.losses)])
        if math.isnan(loss):
            trial.state = "failed"
        else:
            trial.losses.append(loss)
            trial.state = "complete" if len(trial.losses) == EPOCHS else "stopped"
            if trial.state == "complete" and loss <= target:
                return spent
            if search.goes_on(trial):
                trial.state = "running"
        if trial.state == "running":
            heapq.heappush(queue, (now + table.iterations[trial.config], trial.number, trial))
        else:
            free.append(now)
    return math.inf


def by_hand(results: Sequence[Mapping[int, float]], promoted: Sequence[Collection[int]]) -> tuple[int, int] | None:
    """Decide as the paper: `get_job` in algorithm 2 of Li et al., A System for Massively Parallel Tuning, 2020."""
    for rung in reversed(range(len(results))):
        candidates = sorted(results[rung], key=lambda trial: (results[rung][trial], trial))
        for trial in candidates[: len(candidates) // ETA]:
            if trial not in promoted[rung]:
                return rung, trial
    return None


def decide(results: Sequence[Mapping[int, float]], promoted: Sequence[Collection[int]]) -> tuple[int, int] | None:
    """Decide as hydraloop, and check that the paper decides the same."""
    from hydraloop.sweeps.search.asha import promotion  # Syne Tune's environment lacks hydraloop

    ours, by_paper = promotion(results, promoted, "less"), by_hand(results, promoted)
    assert ours == by_paper, f"hydraloop promotes {ours}, the paper {by_paper}"
    return ours


class Asha(Search):
    """ASHA that continues: a trial pauses at each rung, and continues when it is promoted."""

    def __init__(self, table: Table, seed: int) -> None:
        super().__init__(table, seed)
        self.results: list[dict[int, float]] = [{} for _ in RUNGS]
        self.promoted: list[set[int]] = [set() for _ in RUNGS]

    def next(self) -> Trial | None:
        """Return a promoted trial, or a new one."""
        if (decided := decide(self.results, self.promoted)) is None:
            return super().next()
        rung, number = decided
        self.promoted[rung].add(number)
        return self.trials[number]

    def goes_on(self, trial: Trial) -> bool:
        """Pause at a rung."""
        if len(trial.losses) in RUNGS:
            self.results[RUNGS.index(len(trial.losses))][trial.number] = trial.losses[-1]
            return False
        return super().goes_on(trial)


class Tpe(Search):
    """Optuna's TPE. It gets the nearest configuration of the table that is not yet used instead of its suggestion."""

    def __init__(self, table: Table, seed: int) -> None:
        super().__init__(table, seed)
        lib = optuna_package()
        sampler = lib.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP, multivariate=True, constant_liar=True)
        self.study = lib.create_study(sampler=sampler)
        self.steps = {key: None if isinstance(one, Log) else len(one) - 1 for key, one in table.space.items()}
        float_, category = lib.distributions.FloatDistribution, lib.distributions.CategoricalDistribution
        self.dimensions = {
            key: float_(0, 1) if steps is None else category(range(steps + 1)) for key, steps in self.steps.items()
        }
        self.is_free = np.ones(len(table.losses), dtype=bool)

    def choose(self) -> int:
        """Return the configuration that is nearest to a suggestion. The first ones are those of the random search."""
        states = optuna_package().trial.TrialState
        known = self.study.get_trials(deepcopy=False)  # Optuna's own objects, so that a paused trial can run again
        for trial, frozen in zip(self.trials, known, strict=True):
            frozen.state = {"running": states.RUNNING, "complete": states.COMPLETE}.get(trial.state, states.PRUNED)
            frozen.values = trial.losses[-1:] if trial.state == "complete" else None
            frozen.intermediate_values = {} if trial.state == "failed" else dict(enumerate(trial.losses, 1))
        suggested = self.study.ask(self.dimensions).params
        config = self.order[len(self.trials)]
        if len(self.trials) >= STARTUP:
            position = [suggested[key] / (steps or 1) for key, steps in self.steps.items()]
            distances = ((self.table.positions - position) ** 2).sum(1)
            config = int(np.where(self.is_free, distances, math.inf).argmin())
        self.is_free[config] = False
        taken = zip(self.steps.items(), self.table.positions[config].tolist(), strict=True)
        params = {key: where if steps is None else round(where * steps) for (key, steps), where in taken}
        self.study.get_trials(deepcopy=False)[-1].params = params
        return config


class TpeAsha(Asha, Tpe):
    """ASHA whose new trials are those of TPE."""


class Hyperband(Search):
    """Optuna's Hyperband: a pruned trial does not continue. It draws the configurations of the random search."""

    def __init__(self, table: Table, seed: int) -> None:
        super().__init__(table, seed)
        pruner = optuna_package().pruners.HyperbandPruner(min_resource=1, max_resource=EPOCHS, reduction_factor=ETA)
        self.study = optuna_package().create_study(study_name=f"{seed}", pruner=pruner)  # the name draws the brackets
        self.asked: list[Any] = []

    def choose(self) -> int:
        """Return the next draw."""
        self.asked.append(self.study.ask())
        return super().choose()

    def goes_on(self, trial: Trial) -> bool:
        """Ask the pruner."""
        asked = self.asked[trial.number]
        asked.report(trial.losses[-1], len(trial.losses))
        if trial.state == "complete":
            self.study.tell(asked, trial.losses[-1])
            return False
        if asked.should_prune():
            self.study.tell(asked, state=optuna_package().trial.TrialState.PRUNED)
            return False
        return True


class SyneTune(Search):
    """Syne Tune's ASHA, which stops trials. It draws the configurations of the random search."""

    def __init__(self, table: Table, seed: int) -> None:
        super().__init__(table, seed)
        logging.disable(logging.WARNING)
        space = {"config": importlib.import_module("syne_tune.config_space").randint(0, len(self.order) - 1)}
        draws = [{"config": config} for config in self.order]
        asha = importlib.import_module("syne_tune.optimizer.baselines").ASHA
        self.scheduler = asha(space, "loss", "epoch", EPOCHS, random_seed=seed, points_to_evaluate=draws)
        self.begun: list[Any] = []

    def choose(self) -> int:
        """Return the next draw."""
        config = self.scheduler.suggest().config
        status = importlib.import_module("syne_tune.backend.trial_status")
        self.begun.append(status.Trial(len(self.trials), config, datetime.now(UTC)))
        self.scheduler.on_trial_add(self.begun[-1])
        return int(config["config"])

    def goes_on(self, trial: Trial) -> bool:
        """Ask the scheduler."""
        result = {"loss": trial.losses[-1], "epoch": len(trial.losses)}
        return bool(self.scheduler.on_trial_result(self.begun[trial.number], result) == "CONTINUE")


def optuna_package() -> Any:
    """Return Optuna, which reports only errors. It is not imported with this file: Syne Tune's environment lacks it."""
    lib = importlib.import_module("optuna")
    lib.logging.set_verbosity(logging.ERROR)
    warnings.filterwarnings("ignore", category=lib.exceptions.ExperimentalWarning)
    return lib


SEARCHES: dict[str, type[Search]] = {
    "random search": Search,
    "ASHA that continues": Asha,
    "ASHA of Syne Tune": SyneTune,
    "Hyperband of Optuna": Hyperband,
    "TPE of Optuna": Tpe,
    "TPE and ASHA": TpeAsha,
}

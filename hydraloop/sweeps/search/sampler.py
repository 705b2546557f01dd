"""What a search tries next, by Optuna's samplers. The study is in memory; what is asked follows from the history alone.

Each ask has a new study, and a new sampler whose seed is drawn from the seed of the search and the number of the trial:
a sampler that has asked before would suggest something else than one that was made after a kill.
"""

from __future__ import annotations

import logging
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from heapq import nsmallest
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from hydraloop.errors import UserError
from hydraloop.safety.instantiate import instantiate
from hydraloop.sweeps.search.history import History, Trial, rank
from hydraloop.sweeps.search.space import Dimension, Params, Space, Value

if TYPE_CHECKING:
    import optuna

_STARTUP = 5
"""Complete trials that a trial is compared with, at least."""
_BLOCK, _BEST = 500, 25
"""With one objective, TPE knows the newest 500 to 1,000 trials, and the best 25 before: it takes seconds with 10,000,
and compares at most 25 good ones with the others, of which it gives old ones a low weight."""


def make(kind: Any, seed: int) -> optuna.samplers.BaseSampler:
    """Return a sampler.

    Args:
        kind: `tpe`, `random`, `nsga2`, `gp`, or a config with a trusted `_target_`, which gets `seed`.

    Raises:
        UserError: the class is not trusted, or is CMA-ES.
    """
    samplers = imported().samplers
    # Multivariate: dimensions depend on each other. Grouped: conditions. Constant liar: other jobs run meanwhile.
    kinds: dict[str, Callable[[], optuna.samplers.BaseSampler]] = {
        "tpe": lambda: samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True),
        "gp": lambda: samplers.GPSampler(seed=seed),
        "nsga2": lambda: samplers.NSGAIISampler(seed=seed),
        "random": lambda: samplers.RandomSampler(seed=seed),
    }
    if isinstance(kind, str):
        return kinds[kind]()
    if str(kind["_target_"]).endswith(".CmaEsSampler"):
        problem, remedy = (
            "Optuna stores the state of CMA-ES as a pickle, and no pickle is read",
            "Use sweep.sampler=tpe.",
        )
        raise UserError(problem, key="sweep.sampler", remedy=remedy)
    made: optuna.samplers.BaseSampler = instantiate(OmegaConf.create({**kind, "seed": seed}), key="sweep.sampler")
    return made


def imported() -> Any:
    """Return Optuna, which reports only errors."""
    import optuna

    optuna.logging.set_verbosity(logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


class Suggester:
    """Suggests values for trials.

    Args:
        space: of the search.
        kind: of the sampler, see `make`.
        seed: of the search.
    """

    def __init__(self, space: Space, kind: Any, seed: int) -> None:
        self._space, self._kind, self._seed = space, kind, seed

    def suggest(
        self, history: History, number: int, given: Params | None = None
    ) -> tuple[dict[str, Value], Mapping[str, Any]]:
        """Return the values of a new trial, and what the sampler has noted of it.

        Takes 5 ms with 100 trials and 110 ms with 1,000 (TPE).

        Args:
            history: at the time of the ask.
            number: of the trial, the next one of the history.
            given: values that are not to be chosen.

        Raises:
            UserError: the sampler has failed.
        """
        study = self.study(history, _known_to_sampler(history) if self._kind == "tpe" else history.trials)
        study.sampler = make(self._kind, zlib.crc32(f"{self._seed} {number}".encode()))
        if given is not None:
            study.enqueue_trial(dict(given))
        params: dict[str, Value] = {}
        try:
            asked = study.ask()
            for one in self._space.searched:
                if one.is_active(params):
                    params[one.key] = _suggested(asked, one)
        except Exception as error:  # of a sampler of the user
            problem = f"the sampler has failed to suggest trial {number}: {type(error).__name__}: {error}"
            raise UserError(
                problem, key="sweep.sampler", remedy="Repair it, and continue with sweep.resume."
            ) from error
        return params, dict(study.get_trials(deepcopy=False)[-1].system_attrs)

    def prunes(self, history: History, trial: Trial, curve: Mapping[int, float]) -> bool:
        """Return whether a trial ends early after the last validation of a curve, by Optuna's median pruner.

        From five complete trials on, its best value until now is compared with the median of theirs at the same
        validation.
        """
        pruner = imported().pruners.MedianPruner(n_startup_trials=_STARTUP, n_warmup_steps=1)
        study = self.study(history, [one for one in history.trials if one.state == "complete"])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
            return bool(pruner.prune(study, self._frozen(replace(trial, state="running", curve=dict(curve)))))

    def study(self, history: History, trials: Iterable[Trial]) -> optuna.Study:
        """Return a new study with trials of a history. Takes 40 us for each."""
        lib = imported()
        directions = ["maximize" if rule == "greater" else "minimize" for rule in history.rules or ("less",)]
        study: optuna.Study = lib.create_study(storage=lib.storages.InMemoryStorage(), directions=directions)
        study.add_trials([self._frozen(trial, has_curve=len(history.rules) < 2) for trial in trials])
        return study

    @cached_property
    def _distributions(self) -> dict[str, optuna.distributions.BaseDistribution]:
        return {one.key: _distribution(one) for one in self._space.searched}

    def _frozen(self, trial: Trial, *, has_curve: bool = True) -> optuna.trial.FrozenTrial:
        """Return a trial for Optuna. One that has failed is pruned without a value: TPE would repeat a failed one."""
        lib = imported()
        states = lib.trial.TrialState
        is_complete = trial.state == "complete" and trial.values is not None
        state = states.RUNNING if trial.state == "running" else states.COMPLETE if is_complete else states.PRUNED
        made: optuna.trial.FrozenTrial = lib.trial.create_trial(
            state=state,
            values=list(trial.values or ()) if is_complete else None,
            params=dict(trial.params),
            distributions={key: self._distributions[key] for key in trial.params},
            system_attrs=dict(trial.notes),
            intermediate_values=trial.curve if has_curve and trial.state != "failed" else {},
        )
        return made


def _known_to_sampler(history: History) -> list[Trial]:
    """Return the trials that TPE knows of."""
    trials = history.trials
    first = max(0, len(trials) // _BLOCK - 1) * _BLOCK
    if first == 0 or len(history.rules) != 1:
        return trials
    found = [one for one in range(first) if trials[one].state == "complete"]
    best = nsmallest(_BEST, found, key=lambda one: rank(trials[one].values, history.rules))
    return [*(trials[one] for one in sorted(best)), *trials[first:]]


def _distribution(one: Dimension) -> optuna.distributions.BaseDistribution:
    from optuna import distributions

    if one.choices:
        return distributions.CategoricalDistribution(one.choices)
    if one.is_int:
        return distributions.IntDistribution(int(one.low), int(one.high), log=one.is_log, step=int(one.step or 1))
    return distributions.FloatDistribution(one.low, one.high, log=one.is_log, step=one.step)


def _suggested(asked: optuna.Trial, one: Dimension) -> Value:
    if one.choices:
        return str(asked.suggest_categorical(one.key, one.choices))
    if one.is_int:
        return int(asked.suggest_int(one.key, int(one.low), int(one.high), log=one.is_log, step=int(one.step or 1)))
    return float(asked.suggest_float(one.key, one.low, one.high, log=one.is_log, step=one.step))

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
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from hydraloop.config.arguments import parse
from hydraloop.errors import UserError, use_one_of
from hydraloop.safety.instantiate import instantiate
from hydraloop.sweeps.axes import Dimension, Params, Space, Value
from hydraloop.sweeps.search import Search
from hydraloop.sweeps.search_history import History, Trial

if TYPE_CHECKING:
    import optuna

_STARTUP = 5
"""Complete trials that a trial is compared with, at least."""


def make(kind: Any, seed: int) -> optuna.samplers.BaseSampler:
    """Return a sampler.

    Args:
        kind: `tpe`, `random`, `nsga2`, `gp`, or a config with a trusted `_target_`, which gets `seed`.

    Raises:
        UserError: the name is unknown, the class is not trusted, or it is CMA-ES.
    """
    samplers = imported().samplers
    # Multivariate: dimensions depend on each other. Grouped: conditions. Constant liar: other jobs run meanwhile.
    kinds: dict[str, Callable[[], optuna.samplers.BaseSampler]] = {
        "tpe": lambda: samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True),
        "gp": lambda: samplers.GPSampler(seed=seed),
        "nsga2": lambda: samplers.NSGAIISampler(seed=seed),
        "random": lambda: samplers.RandomSampler(seed=seed),
    }
    if not isinstance(kind, Mapping):
        if kind not in kinds:
            remedy = use_one_of(list(kinds))
            raise UserError(f"{kind!r} is not a sampler", key="sweep.sampler", remedy=remedy)
        return kinds[kind]()
    if str(kind["_target_"]).endswith(".CmaEsSampler"):
        problem = "Optuna stores the state of CMA-ES as a pickle, and no pickle is read"
        raise UserError(problem, key="sweep.sampler", remedy="Use sweep.sampler=tpe.")
    made: optuna.samplers.BaseSampler = instantiate(OmegaConf.create({**kind, "seed": seed}), key="sweep.sampler")
    return made


def imported() -> Any:
    """Return Optuna, which reports only errors."""
    import optuna

    optuna.logging.set_verbosity(logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def check(search: Search, enqueue: Iterable[Any]) -> list[dict[str, Value]]:
    """Check what a search needs of Optuna, and return the values of the trials that run first.

    Args:
        enqueue: mappings of values, by key, as in YAML.

    Raises:
        UserError: a dimension is wrong, the sampler is not trusted, or an enqueued trial is outside the space.
    """
    make(search.sampler, 0)
    for one in search.space.dimensions:
        try:
            _distribution(one)
        except ValueError as error:
            remedy = "Write interval(0,0.5), or tag(log,interval(1e-4,1e-1)) with ends above 0: the smaller end first."
            raise UserError(str(error), key=one.key, remedy=remedy) from error
    points = []
    for given in enqueue:
        try:
            points.append({str(key): _value(search.space, key, value) for key, value in given.items()})
            _frozen(search.space, Trial(0, points[-1]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            remedy = "Write values of keys that are searched: 'sweep.enqueue=[{optimizer.lr: 1e-3}]'."
            raise UserError(
                f"{given} is not a trial of this search: {error}", key="sweep.enqueue", remedy=remedy
            ) from error
    return points


def _value(space: Space, key: object, given: Any) -> Value:
    """Return an enqueued value as the sampler would suggest it."""
    (one,) = (one for one in space.dimensions if one.key == key)
    if not one.choices:
        return int(given) if one.is_int and int(given) == given else float(given)
    same = (choice for choice in one.choices if parse([f"{one.element}={choice}"])[0].value() == given)
    return next(same, str(given))


def suggest(
    search: Search, history: History, given: Params | None = None
) -> tuple[dict[str, Value], Mapping[str, Any]]:
    """Return the values of a new trial, the next one of a history, and what the sampler has noted of it.

    Takes 5 ms with 100 trials and 110 ms with 1,000 (TPE).

    Args:
        history: at the time of the ask.
        given: values that are not to be chosen.

    Raises:
        UserError: the sampler has failed.
    """
    number, params = len(history.trials), dict[str, Value]()
    made = study(search.space, history, history.trials)
    made.sampler = make(search.sampler, zlib.crc32(f"{search.seed} {number}".encode()))
    if given is not None:
        made.enqueue_trial(dict(given))
    try:
        asked = made.ask()
        for one in search.space.dimensions:
            if one.is_active(params):
                params[one.key] = _suggested(asked, one)
    except Exception as error:  # of a sampler of the user
        problem = f"the sampler has failed to suggest trial {number}: {type(error).__name__}: {error}"
        raise UserError(problem, key="sweep.sampler", remedy="Repair it, and continue with sweep.resume.") from error
    return params, dict(made.get_trials(deepcopy=False)[-1].system_attrs)


def prunes(search: Search, history: History, trial: Trial, curve: Mapping[int, float]) -> bool:
    """Return whether a trial ends early after the last validation of a curve, by Optuna's median pruner.

    From five complete trials and `prune_after` validations on, its best value until now is compared with the median
    of theirs at the same validation.
    """
    pruner = imported().pruners.MedianPruner(n_startup_trials=_STARTUP, n_warmup_steps=search.prune_after)
    made = study(search.space, history, [one for one in history.trials if one.state == "complete"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
        return bool(pruner.prune(made, _frozen(search.space, replace(trial, state="running", curve=dict(curve)))))


def study(space: Space, history: History, trials: Iterable[Trial]) -> optuna.Study:
    """Return a new study with trials of a history. Takes 40 us for each."""
    lib = imported()
    directions = ["maximize" if rule == "greater" else "minimize" for rule in history.rules or ("less",)]
    made: optuna.Study = lib.create_study(storage=lib.storages.InMemoryStorage(), directions=directions)
    made.add_trials([_frozen(space, trial, has_curve=len(history.rules) < 2) for trial in trials])
    return made


def _frozen(space: Space, trial: Trial, *, has_curve: bool = True) -> optuna.trial.FrozenTrial:
    """Return a trial for Optuna. One that has failed is pruned without a value: TPE would repeat a failed one."""
    lib = imported()
    states = lib.trial.TrialState
    is_complete = trial.state == "complete" and trial.values is not None
    state = states.RUNNING if trial.state == "running" else states.COMPLETE if is_complete else states.PRUNED
    made: optuna.trial.FrozenTrial = lib.trial.create_trial(
        state=state,
        values=list(trial.values or ()) if is_complete else None,
        params=dict(trial.params),
        distributions={one.key: _distribution(one) for one in space.dimensions if one.key in trial.params},
        system_attrs=dict(trial.notes),
        intermediate_values=trial.curve if has_curve and trial.state != "failed" else {},
    )
    return made


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

"""How a search decides: the options of `sweep.*` that `sweep.json` has, checked before a job starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from math import ceil
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from hydraloop.condition import Condition
from hydraloop.errors import Remedy, UserError, leave_out, not_installed, suggestion
from hydraloop.run_files.changes import differences
from hydraloop.run_files.config_yaml import plain
from hydraloop.safety.secrets import masked
from hydraloop.schemas.sweep import SweepConf

Rule = Literal["greater", "less"]
_RULES: dict[str, Rule] = {"max": "greater", "min": "less"}
_GP_MOST = 200
"""Trials of a Gaussian process: an ask takes 5.5 s with 1,000."""
_OF_SEARCH = ("sampler", "prune", "promote", "objectives", "enqueue", "until")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a search decides. All of it may be written to JSON."""

    seed: int
    """The seed of the search, which is the seed of the first job."""
    sampler: Any = "tpe"
    """See `sampler.make`."""
    prune: str | None = None
    promote: str | None = None
    rung: int = 1
    """Validations until the first rung."""
    validations: int | None = None
    """The validations of a whole run; None if neither pruning nor promotion needs the number."""
    objectives: Mapping[str, Rule] = field(default_factory=dict)
    """Empty: what each run monitors."""

    def masked(self) -> Settings:
        """Return the settings with secrets masked."""
        return replace(self, sampler=masked(plain(self.sampler)))

    def check_same(self, stored: Settings) -> None:
        """Refuse to continue a search with other settings.

        Args:
            stored: the settings of the search, masked.

        Raises:
            UserError: one has changed.
        """
        for change in differences(asdict(stored), asdict(self.masked())):
            raise UserError(
                f"the search decides by another value: {change}",
                key=f"sweep.{change.key.partition('.')[0]}" if change.key != "seed" else "seed",
                remedy="Leave out what has changed. sweep.trials, sweep.until and sweep.max_workers may change.",
            )


def of(options: DictConfig, configs: Sequence[DictConfig], *, repeats: int) -> Settings:
    """Return the settings that a command line asks for.

    Args:
        options: `sweep.*`.
        configs: of the corners of the space, the first job at first.
        repeats: the jobs of a trial.

    Raises:
        UserError: options contradict each other, or the search could not decide by them.
    """
    for package in ("optuna", *(["scipy"] if options.sampler == "gp" else [])):
        if find_spec(package) is None:
            raise not_installed(package, key="sweep.trials", use="chooses the values of a search")
    objectives = _objectives(options)
    _check_comparisons(options, objectives=len(objectives), repeats=repeats)
    sampler = _sampler(options)
    if options.retry_failed:
        text = "Leave it out. sweep.max_retries=2 starts a job again as soon as it has failed."
        remedy = Remedy(text, leave_out=["sweep.retry_failed"])
        raise UserError("a search does not run failed trials again", key="sweep.retry_failed", remedy=remedy)
    validations = _validations(configs, options) if options.prune or options.promote else None
    for cfg in configs:
        if None in (cfg.engine.val_interval, cfg.data.get("val")):
            remedy = Remedy("Set data.val and engine.val_interval=1.", add=["engine.val_interval=1"])
            raise UserError("a search compares validations, and a job has none", key="sweep.trials", remedy=remedy)
        if cfg.engine.pause_after is not None:
            remedy = leave_out("engine.pause_after") + " To pause trials: sweep.promote=asha"
            raise UserError("a search does not continue such a job", key="engine.pause_after", remedy=remedy)
    if options.until is not None:
        until_condition(options.until)
    return Settings(
        int(configs[0].seed),
        sampler,
        options.prune,
        options.promote,
        options.rung,
        validations,
        objectives,
    )


def until_condition(text: Any) -> Condition:
    """Return the condition of `sweep.until`.

    Raises:
        UserError: the text is not a condition.
    """
    example = "sweep.until='\"best > 0.99 or hours > 2\"'"
    return Condition(str(text), ("best", "hours", "stale"), key="sweep.until", example=example)


def _objectives(options: DictConfig) -> dict[str, Rule]:
    """Return which values of each objective are better.

    Raises:
        UserError: an option says neither max nor min.
    """
    objectives: dict[str, Rule] = {}
    for name, how in options.objectives.items():
        if how not in _RULES:
            remedy = "Write 'sweep.objectives={accuracy: max, time: min}'."
            raise UserError(f"{how!r} is neither max nor min", key=f"sweep.objectives.{name}", remedy=remedy)
        objectives[str(name)] = _RULES[how]
    return objectives


def _check_comparisons(options: DictConfig, *, objectives: int, repeats: int) -> None:
    """Refuse to prune or promote where jobs cannot be compared one by one.

    Raises:
        UserError: there are several objectives or several jobs of a trial, or both options are set.
    """
    for key in ("prune", "promote"):
        if options[key] is not None and (objectives > 1 or repeats > 1 or (options.prune and options.promote)):
            why = (
                "it compares one objective"
                if objectives > 1
                else f"it compares single jobs, and {options.average} has several values"
                if repeats > 1
                else "a search either prunes or promotes"
            )
            raise UserError(why, key=f"sweep.{key}", remedy=leave_out(f"sweep.{key}"))


def _sampler(options: DictConfig) -> Any:
    """Return the sampler: its name, or the mapping that names its class.

    Raises:
        UserError: the name is unknown, or the sampler is too slow for so many trials.
    """
    sampler: Any = options.sampler
    if OmegaConf.is_dict(sampler):
        sampler = OmegaConf.to_container(sampler, resolve=True)
    elif sampler not in (known := ("tpe", "random", "nsga2", "gp")):
        remedy = suggestion(str(sampler), known)
        remedy += " Or name a class: 'sweep.sampler={_target_: my_project.MySampler}'."
        raise UserError(f"{sampler!r} is unknown", key="sweep.sampler", remedy=remedy)
    if sampler == "gp" and options.trials > _GP_MOST:
        problem = f"a Gaussian process takes seconds to suggest a trial after {_GP_MOST} trials"
        remedy = Remedy(f"Use sweep.sampler=tpe, or sweep.trials={_GP_MOST}.", add=["sweep.sampler=tpe"])
        raise UserError(problem, key="sweep.sampler", remedy=remedy)
    return sampler


def check_unused(options: DictConfig) -> None:
    """Refuse options of a search in a grid.

    Raises:
        UserError: one is set.
    """
    defaults = OmegaConf.structured(SweepConf)
    for name in _OF_SEARCH:
        if options[name] != defaults[name]:
            raise UserError(
                "it is an option of a search, and this sweep is a grid",
                key=f"sweep.{name}",
                remedy=Remedy("Add the number of trials: sweep.trials=50", add=["sweep.trials=50"]),
            )


def _validations(configs: Sequence[DictConfig], options: DictConfig) -> int:
    """Return the validations of a whole run.

    Raises:
        UserError: there are none, they are not known, or they differ between jobs.
    """
    key = "sweep.prune" if options.prune else "sweep.promote"
    found = {_count(cfg.engine, has_data=cfg.data.get("val") is not None) for cfg in configs}
    count = found.pop()
    if not count:
        remedy = "Set data.val and engine.val_interval=1. Count both in epochs (engine.max_epochs), or both in "
        remedy += "iterations (engine.max_iters, engine.val_by_epoch=false)."
        raise UserError("it compares validations, and their number in a run is not known", key=key, remedy=remedy)
    if found:
        problem = "jobs with different numbers of validations cannot be compared at the same one"
        raise UserError(problem, key=key, remedy=f"Do not search the length of training, or leave {key} out.")
    if options.rung >= count and options.promote:
        problem = f"the first rung is after {options.rung} validations, and a run has {count}"
        remedy = Remedy(f"Use a value below {count}: sweep.rung=1", add=["sweep.rung=1"])
        raise UserError(problem, key="sweep.rung", remedy=remedy)
    return count


def _count(engine: DictConfig, *, has_data: bool) -> int:
    """Return the validations of a run; 0 if there are none, or their number depends on the data."""
    length = engine.max_epochs if engine.max_iters is None else engine.max_iters
    if not has_data or engine.val_interval is None or engine.val_by_epoch != (engine.max_iters is None):
        return 0
    return ceil(max(0, int(length) - max(0, int(engine.val_begin) - 1)) / int(engine.val_interval))

"""Search: the space, the number of trials, how it decides, and which keys exist only with some options of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from hydraloop.config.messages import COMPOSING_ERRORS
from hydraloop.engine.interval import Every
from hydraloop.errors import UserError, leave_out, not_installed
from hydraloop.files.changes import differences
from hydraloop.files.config_yaml import plain
from hydraloop.files.secrets import masked
from hydraloop.sweeps.axes import Dimension, Lines, Space
from hydraloop.sweeps.compose_jobs import GridComposer

Rule = Literal["greater", "less"]
_RULES: dict[str, Rule] = {"max": "greater", "min": "less"}


@dataclass(frozen=True, slots=True)
class Search:
    """A search. Each trial is a job, or one for each value of the averaged key."""

    space: Space
    trials: int
    """`sweep.trials`."""
    seed: int = 0
    """The seed of the first job."""
    sampler: Any = "tpe"
    """See `sampler.make`."""
    prune: str | None = None
    promote: str | None = None
    rung: int = 1
    """Validations until the first rung."""
    objectives: Mapping[str, Rule] = field(default_factory=dict)
    """Empty: what each run monitors."""
    validations: int | None = None
    """With `sweep.prune`: of a whole run. A job is not pruned after its last one."""
    prune_after: int = 1
    """Validations of a job before it may be pruned."""

    @property
    def repeats(self) -> int:
        """The number of jobs of a trial."""
        return max(1, len(self.space.repeats))

    def masked(self) -> Search:
        """Return the search with secrets masked."""
        return replace(self, space=self.space.masked(), sampler=masked(plain(self.sampler)))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Search:
        """Return what `dataclasses.asdict` and JSON have made into lists and mappings."""
        return cls(**{**content, "space": Space.from_json(content["space"])})

    def check_same(self, stored: Search) -> None:
        """Refuse to continue a search in another space, or with other decisions.

        Args:
            stored: the search, masked.

        Raises:
            UserError: this one differs in more than the number of trials.
        """
        new = replace(self.masked(), trials=stored.trials)
        remedy = "Give what the search has. To start a new search, leave sweep.resume and hydra.sweep.dir out."
        if (new.space.dimensions, new.space.repeats) != (stored.space.dimensions, stored.space.repeats):
            raise UserError("the search is over other values", key="sweep.resume", remedy=remedy)
        for change in differences(asdict(replace(stored, space=new.space)), asdict(new)):
            raise UserError(f"the search decides by another value: {change}", key="sweep.resume", remedy=remedy)


def search_of(space: Space, options: DictConfig, configs: Sequence[DictConfig]) -> Search:
    """Return the search that a command line asks for.

    Args:
        options: `sweep.*`.
        configs: of the corners of the space, the first job at first.

    Raises:
        UserError: options contradict each other, or the search could not decide by them.
    """
    if find_spec("optuna") is None:
        raise not_installed("optuna", key="sweep.trials", use="chooses the values of a search")
    objectives: dict[str, Rule] = {}
    for name, how in options.objectives.items():
        if how not in _RULES:
            remedy = "Write 'sweep.objectives={accuracy: max, time: min}'."
            raise UserError(f"{how!r} is neither max nor min", key=f"sweep.objectives.{name}", remedy=remedy)
        objectives[str(name)] = _RULES[how]
    for key in ("prune", "promote"):
        if options[key] and (len(objectives) > 1 or space.repeats or (options.prune and options.promote)):
            problem = "it needs a single objective, trials of one job, and no other way to end trials"
            raise UserError(problem, key=f"sweep.{key}", remedy=leave_out(f"sweep.{key}"))
    for cfg in configs:
        if None in (cfg.engine.val_interval, cfg.data.get("val")):
            remedy = "Set data.val and engine.val_interval=1."
            raise UserError("a search compares validations, and a job has none", key="sweep.trials", remedy=remedy)
        if cfg.engine.pause_after is not None:
            raise UserError("a search does not continue such a job", key="engine.pause_after", remedy="Leave it out.")
    lengths = {planned_validations(cfg.engine) if options.prune else None for cfg in configs}
    if len(lengths) > 1 or 0 in lengths:
        problem, remedy = "the validations of a run are not known, or differ between jobs", leave_out("sweep.prune")
        raise UserError(problem, key="sweep.prune", remedy=remedy)
    planned = lengths.pop()
    prune_after = options.prune_after or max(1, (planned or 0) // 4)
    if planned is not None and prune_after >= planned:
        problem = f"a job may end early after validation {prune_after}, and a run has {planned}"
        remedy = "Use a lower number, or leave sweep.prune out."
        raise UserError(problem, key="sweep.prune_after", remedy=remedy)
    sampler = OmegaConf.to_container(options.sampler, resolve=True) if OmegaConf.is_dict(options.sampler) else None
    return Search(
        space,
        options.trials,
        int(configs[0].seed),
        sampler or options.sampler,
        options.prune,
        options.promote,
        options.rung,
        objectives,
        planned,
        prune_after,
    )


def planned_validations(engine: DictConfig) -> int:
    """Return the validations of a run, with the one at its end; 0 if their number depends on the data."""
    if engine.val_by_epoch != (engine.max_iters is None):
        return 0
    length = int(engine.max_epochs if engine.max_iters is None else engine.max_iters)
    every = Every(engine.val_interval, engine.val_begin)
    return every.times_until(length) + (not every.fires_at(length))


def with_conditions(space: Space, grid: GridComposer) -> Space:
    """Return a space whose dimensions have their conditions.

    Args:
        grid: composes the jobs.
    """
    chosen = [one for one in space.dimensions if grid.choices([f"{one.element}={one.ends()[0]}"])]

    @cache
    def composed(lines: Lines) -> DictConfig | None:
        with suppress(*COMPOSING_ERRORS, ValueError):  # reported when the jobs are checked
            return grid.compose(lines)
        return None

    def has(lines: Lines, key: str) -> bool:
        cfg, (parent, _, name) = composed(lines), key.rpartition(".")
        node: Any = cfg if cfg is None or not parent else OmegaConf.select(cfg, parent)
        return OmegaConf.is_dict(node) and name in node

    def condition(one: Dimension) -> Dimension:
        if one.element.startswith("+") or one in chosen:
            return one
        only, needed = dict[str, tuple[str, ...]](), space.constants
        for group in chosen:
            lines = {choice: (*needed, f"{group.element}={choice}") for choice in group.choices}
            found = tuple(choice for choice, job in lines.items() if has(job, one.key))
            if found and len(found) < len(lines):
                only[group.key], needed = found, lines[found[0]]
        return replace(one, only=only)

    found = map(condition, space.dimensions)
    return replace(space, dimensions=tuple(sorted(found, key=lambda one: bool(one.only))))

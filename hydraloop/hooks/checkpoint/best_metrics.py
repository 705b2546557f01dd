"""Which metrics have a best checkpoint, and which of their values are better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydraloop.errors import UserError
from hydraloop.hooks.checkpoint.out_dir import in_file_name
from hydraloop.hooks.shared.monitoring import RULES, check_metric, higher_is_better
from hydraloop.option_checks import check_choice

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


class SaveBest:
    """The options `save_best`, `rule`, `greater_keys` and `less_keys` of `CheckpointHookConf`.

    Raises:
        UserError: an unknown rule, or a wrong number of rules.
    """

    def __init__(
        self,
        save_best: str | bool | Sequence[str] | None,
        rule: str | Sequence[str | None] | None,
        greater_keys: Sequence[str] | None,
        less_keys: Sequence[str] | None,
    ) -> None:
        self.names = _names(save_best)
        """As given; empty for no best file."""
        self._rules = _listed(rule)
        self._greater_keys = greater_keys
        self._less_keys = less_keys
        for each in self._rules:
            check_choice(RULES, rule=each)
        if not isinstance(rule, str | None) and len(self._rules) not in (1, len(self.names)):
            raise UserError(
                f"{len(self._rules)} rules for {len(self.names)} metrics in save_best",
                key="rule",
                remedy="Set one rule for all, or a list with one rule for each.",
            )

    def higher(self, engine: Engine, *, key: str) -> dict[str, bool]:
        """Return {metric: whether its high values are good}, in the order of `save_best`.

        Args:
            key: the hook's key in the config, for the errors.

        Raises:
            UserError: there is no such metric, or no rule applies to it.
        """
        names, rules = self.names, self._rules
        if names == ["auto"]:
            names = list(engine.metric_names[:1])
        found: dict[str, bool] = {}
        for name, rule in zip(names, rules if len(rules) == len(names) else rules * len(names), strict=True):
            check_metric(name, engine, key=f"{key}.save_best")
            same = [other for other in found if other != name and in_file_name(other) == in_file_name(name)]
            if same:
                raise UserError(
                    f"the best files of {same[0]} and {name} would have the same name",
                    key=f"{key}.save_best",
                    remedy="Leave one of them out, or rename its data set or metric.",
                )
            found[name] = higher_is_better(
                name, engine, rule=rule, greater_keys=self._greater_keys, less_keys=self._less_keys, key=key
            )
        return found


def _names(save_best: str | bool | Sequence[str] | None) -> list[str]:
    if isinstance(save_best, bool):  # MMClassification's spelling
        return ["auto"] if save_best else []
    return [] if save_best is None else [str(name) for name in _listed(save_best)]


def _listed(option: str | Sequence[Any] | None) -> list[Any]:
    """Return an option that is one value or a list of them as a list."""
    return list(option) if isinstance(option, Sequence) and not isinstance(option, str) else [option]

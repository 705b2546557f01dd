"""Loads states by name. A missing or unknown one is an error, or a warning with `resume_strict=false`."""

from __future__ import annotations

import logging
from typing import Any

from hydraloop.errors import UserError

log = logging.getLogger(__name__)


def load_named(entry: str, targets: dict[str, Any], states: dict[str, Any], strict: bool) -> None:
    """Load each state into the target of its name; with `strict` the names must be the same."""
    check_names(entry, targets, states, strict)
    for name, target in targets.items():
        if name in states:
            target.load_state_dict(states[name])


def check_names(entry: str, targets: dict[str, Any], states: dict[str, Any], strict: bool) -> None:
    """Refuse names that only one of both has, or warn of them."""
    for name in targets.keys() - states.keys():
        differs(strict, f"{entry}.{name}", "the checkpoint has no state of it", "Leave it out, or set")
    for name in states.keys() - targets.keys():
        problem = "the checkpoint has its state, but this run does not use it"
        differs(strict, f"{entry}.{name}", problem, "Repeat the options of the resumed run, or set")


def differs(strict: bool, key: str, problem: str, remedy: str) -> None:
    """Raise the problem, or warn of it.

    Raises:
        UserError: with `strict`.
    """
    if strict:
        raise UserError(problem, key=key, remedy=f"{remedy} resume_strict=false to continue without that state.")
    log.warning("%s: %s; continuing without that state (resume_strict=false)", key, problem)

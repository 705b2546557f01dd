"""Names of a W&B run: from options or environment variables, checked against W&B's limits. Does not import wandb."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hydraloop.errors import UserError
from hydraloop.safety.secrets import masked

LONGEST = 128
"""Most characters of the name of a project, group or run."""
NOT_IN_PROJECTS = "/\\#?%:"
VARIABLES = {
    "project": "WANDB_PROJECT",
    "entity": "WANDB_ENTITY",
    "group": "WANDB_RUN_GROUP",
    "job_type": "WANDB_JOB_TYPE",
    "tags": "WANDB_TAGS",
    "notes": "WANDB_NOTES",
    "name": "WANDB_NAME",
}
"""W&B's environment variables, by option. The training process reads them; `sync.py` may run in another environment."""
_LONGEST_TAG = 64


def names_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names from the options, or from the environment variables where options are None; secrets masked.

    Args:
        given: the options in `VARIABLES`, None where they are not set.

    Raises:
        UserError: W&B does not accept one of them.
    """
    found = {key: _value(key, value) for key, value in given.items()}
    for key in ("project", "group", "name"):
        if found[key] is not None and not 1 <= len(found[key]) <= LONGEST:
            _refuse(given, key, f"it has {len(found[key])} characters", f"Use 1 to {LONGEST}, or null.")
    if set(found["project"] or "") & set(NOT_IN_PROJECTS):
        problem = f"W&B does not accept a project called {found['project']!r}"
        _refuse(given, "project", problem, f"Use a name without any of {NOT_IN_PROJECTS}")
    tags = found["tags"]
    labels = [] if isinstance(tags, str) else [str(tag) for tag in tags or ()]
    if isinstance(tags, str) or not all(1 <= len(label) <= _LONGEST_TAG for label in labels):
        _refuse(given, "tags", f"{tags!r} is not a list of labels", f"Use a list, 1 to {_LONGEST_TAG} characters each.")
    hidden: dict[str, Any] = masked({**found, "tags": labels})
    return hidden


def _value(key: str, option: Any) -> Any:
    variable = os.environ.get(VARIABLES[key])
    if option is not None or not variable:
        return option
    return [tag.strip() for tag in variable.split(",") if tag.strip()] if key == "tags" else variable


def _refuse(given: Mapping[str, Any], key: str, problem: str, remedy: str) -> None:
    source = f"{VARIABLES[key]}: " if given[key] is None else ""
    raise UserError(f"{source}{problem}", key=key, remedy=remedy)

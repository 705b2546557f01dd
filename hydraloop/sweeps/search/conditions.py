"""Which dimensions of a search depend on the option of a config group: a key exists only with some options.

`optimizer=sgd,adamw optimizer.momentum=interval(0.5,0.99)`: only SGD has a momentum. It is not sampled with AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hydraloop.sweeps.search.space import Dimension, Space


def with_conditions(space: Space, groups: Sequence[str], has: Callable[[Sequence[str], str], bool]) -> Space:
    """Return a space whose dimensions have their conditions.

    Args:
        groups: keys of dimensions that select options of config groups.
        has: returns whether the config with some overrides has a key.
    """
    constants = space.lines({})
    chosen = [one for one in space.searched if one.key in groups]

    def condition(one: Dimension) -> Dimension:
        if one.element.startswith("+") or one.key in groups:
            return one
        only, needed = dict[str, tuple[str, ...]](), constants
        for group in chosen:
            lines = {choice: f"{group.element}={choice}" for choice in group.choices}
            found = [choice for choice, line in lines.items() if has((*needed, line), one.key)]
            if found and len(found) < len(lines):
                only[group.key], needed = tuple(found), (*needed, lines[found[0]])
        return replace(one, only=only)

    return replace(space, dimensions=tuple(condition(one) for one in space.dimensions))

"""Names of metrics and parameters that MLflow accepts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

LONGEST = 250
"""Most characters of a name."""
_BAD = re.compile(r"[^\w.\- :/]")
_BAD_PARTS = ("", ".", "..")


def clean(name: str) -> str:
    """Replace by `_` what MLflow refuses in a name: most signs, and parts such as `..` that would change a path."""
    parts = [_BAD.sub("_", part) for part in name.split("/")]
    text = "/".join("_" * max(1, len(part)) if part in _BAD_PARTS else part for part in parts)
    if len(text) > LONGEST:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        text = f"{text[: LONGEST - 9].rstrip('/')}_{digest}"
    return text


class Names:
    """Maps names to valid ones. Different names stay different, and the mapping of a name never changes.

    Args:
        changed: names that are sent under another name. Changed in place; plain JSON.
    """

    def __init__(self, changed: dict[str, str]) -> None:
        self._changed = changed
        self._known: dict[str, str] = {}

    def of(self, name: str) -> str:
        """Return the name under which `name` is sent."""
        if name not in self._known:
            self._known[name] = self._found(name)
        return self._known[name]

    def new(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that are changed now for the first time."""
        names = sorted(dict.fromkeys(names), key=lambda name: clean(name) != name)  # valid names stay unchanged
        return [name for name in names if name not in self._changed and self.of(name) != name]

    def _found(self, name: str) -> str:
        if name in self._changed:
            return self._changed[name]
        text = wanted = clean(name)
        taken, number = {*self._changed.values(), *self._known}, 2
        while text in taken:
            text, number = f"{wanted[: LONGEST - 4]}_{number}", number + 1
        if text != name:
            self._changed[name] = text
        return text

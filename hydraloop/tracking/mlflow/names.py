"""Names that MLflow takes: of metrics, parameters and pictures."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

LONGEST = 250
"""Characters of a name."""
_BAD = re.compile(r"[^\w.\- :/]")
_BAD_PARTS = ("", ".", "..")
_BAD_IN_FILES = re.compile(r"[^A-Za-z0-9_.\-]")


def clean(name: str) -> str:
    """A name with `_` in place of what MLflow refuses: most signs, and what a path would read as another one."""
    parts = [_BAD.sub("_", part) for part in name.split("/")]
    text = "/".join("_" * max(1, len(part)) if part in _BAD_PARTS else part for part in parts)
    if len(text) > LONGEST:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        text = f"{text[: LONGEST - 9].rstrip('/')}_{digest}"
    return text


def in_file_name(name: str) -> str:
    """A name as part of an artifact's name."""
    return _BAD_IN_FILES.sub("_", name)


class Names:
    """Names as they are sent. Two names stay two, and a name is sent the same way for ever.

    Args:
        changed: those sent under another name, changed in place; plain JSON.
    """

    def __init__(self, changed: dict[str, str]) -> None:
        self._changed = changed
        self._known: dict[str, str] = {}

    def of(self, name: str) -> str:
        """How `name` is sent."""
        if name not in self._known:
            self._known[name] = self._found(name)
        return self._known[name]

    def new(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that will be changed now, for the first time."""
        names = sorted(dict.fromkeys(names), key=lambda name: clean(name) != name)  # good ones keep their own
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

"""Secrets in what is written: masked in configs, overrides, command lines, and any text. Without torch.

Three things give a secret away: the name in front of it (`secret_names.py`), its own shape (`hf_…`,
`https://user:password@host`), and that it is known: the value of an environment variable with such a name, or one that
`remember` was given with the config. Known ones are found wherever they stand, in a traceback, too.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from hydraloop.masked_text import MASK, mask_shapes, mask_values, url_passwords
from hydraloop.secret_names import is_harmless, looks_random, looks_secret, secrecy

__all__ = [
    "MASK",
    "looks_secret",
    "mask_command",
    "mask_overrides",
    "mask_text",
    "masked",
    "remember",
    "remember_overrides",
]

_SHORTEST = 8
"""Characters of a value that is looked for in any text: a shorter one is part of other words."""
_OVERRIDE = re.compile(r"(?P<key>(?:\+{1,2}|~)?(?P<name>[\w./@-]+)=)(?P<value>.+)", re.DOTALL)
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?")

_known: tuple[str, ...] = ()
"""Values that `remember` was given, in every form, the longest first. Replaced, not changed: other threads read it."""


def masked(config: Any) -> Any:
    """The same structure with everything secret in it replaced by `***`.

    Args:
        config: a plain container, resolved or not. Under a secret key, strings are masked, also those in lists and
            mappings; never a number, a bool, None, an interpolation (`${oc.env:API_KEY}`), nor what Hydra reads
            (`_target_`). All other strings are masked as text, and those in lists as overrides.
    """
    return _masked(config, "", tuple(_all_known()))


def _masked(node: Any, key: str, known: Sequence[str], *, in_list: bool = False) -> Any:
    if isinstance(node, Mapping):
        return {name: _masked(value, _below(key, name), known) for name, value in node.items()}
    if isinstance(node, list | tuple):
        return [_masked(item, key, known, in_list=True) for item in node]
    if not isinstance(node, str):
        return node
    if looks_secret(key):
        return node if is_harmless(node) else MASK
    return _mask_override(node, known) if in_list else _mask_text(node, known)


def _below(key: str, name: object) -> str:
    """What an entry of a mapping is called: one in a surely secret mapping is as secret."""
    return f"{key}.{name}" if secrecy(key) == "sure" else str(name)


def mask_text(text: str) -> str:
    """The text with everything secret in it replaced by `***`: a message, a traceback, YAML, a diff.

    Masked are known values; well-known kinds of tokens; the password in a URL; what stands behind a secret name
    (`api_key=…`, `"api_key": "…"`, `--api-key …`, `Authorization: Bearer …`, `?token=…`), unless it is plainly code
    (`token=get_token()`). In linear time.
    """
    return _mask_text(text, _all_known())


def _mask_text(text: str, known: Iterable[str]) -> str:
    for value in known:
        if value in text:
            text = text.replace(value, MASK)
    return mask_values(mask_shapes(text))


def mask_overrides(overrides: Iterable[str]) -> list[str]:
    """Overrides of Hydra's as typed, `+hooks.mine.api_key=…`: the whole value of a secret key is masked."""
    known = tuple(_all_known())
    return [_mask_override(line, known) for line in overrides]


def _mask_override(line: str, known: Sequence[str]) -> str:
    found = _OVERRIDE.fullmatch(line)
    if found is None:
        return _mask_text(line, known)
    value = found["value"]
    if not looks_secret(found["name"]):
        return found["key"] + mask_values(_mask_text(value, known), strict=value[0] in "{[")
    plain = value.strip("'\"")
    return line if is_harmless(plain) or _NUMBER.fullmatch(plain) else found["key"] + MASK


def mask_command(arguments: Sequence[str]) -> str:
    """A command line, quoted as a shell needs it.

    Args:
        arguments: `sys.argv`, or the like; overrides and flags (`--api-key`, its value the next one) are both known.
    """
    shown, secret, known = [], False, tuple(_all_known())
    for line in arguments:
        shown.append(MASK if secret and not line.startswith("-") else _mask_override(line, known))
        secret = line.startswith("--") and "=" not in line and looks_secret(line)
    return shlex.join(shown).replace(f"'{MASK}'", MASK)


def remember(config: Any) -> None:
    """Know a config's secrets from now on in this process: `mask_text` finds them wherever they stand.

    Args:
        config: a plain container, resolved. A value of less than 8 characters is not looked for elsewhere; nor is
            one whose key is not surely a secret's (`sort_key`), unless it looks random.
    """
    global _known
    found = {form for value in _secrets(config, "") for form in _forms(value)}
    if not found.issubset(_known):
        _known = tuple(sorted(found.union(_known), key=len, reverse=True))


def remember_overrides(overrides: Iterable[str]) -> None:
    """Know the secrets of overrides, or of anything else of the form `key=value`, before they are a config."""
    for line in overrides:
        found = _OVERRIDE.fullmatch(line)
        if found is not None:
            remember({found["name"].lstrip("-"): found["value"].strip("'\"")})


def _secrets(node: Any, key: str) -> Iterator[str]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _secrets(value, _below(key, name))
    elif isinstance(node, list | tuple):
        for item in node:
            yield from _secrets(item, key)
    elif isinstance(node, str):
        if _is_worth_finding(key, node):
            yield node
        yield from (password for password in url_passwords(node) if _is_worth_finding("password", password))


def _is_worth_finding(key: str, value: str) -> bool:
    found = secrecy(key)
    if found == "none" or len(value) < _SHORTEST or is_harmless(value):
        return False
    if value.isalpha() and looks_secret(value):  # `password`, of a database on one's own machine: it is in every text
        return False
    return found == "sure" or looks_random(value)


def _forms(value: str) -> set[str]:
    """A value as it is, and as it stands in URLs, JSON and Python."""
    if value.isalnum():
        return {value}
    return {value, quote(value, safe=""), json.dumps(value)[1:-1], repr(value)[1:-1]}


def _all_known() -> Iterator[str]:
    yield from _known
    for name in os.environ:
        if looks_secret(name):
            value = os.environ.get(name, "")
            if _is_worth_finding(name, value) and not (value.startswith("/") and os.path.exists(value)):
                yield from sorted(_forms(value), key=len, reverse=True)

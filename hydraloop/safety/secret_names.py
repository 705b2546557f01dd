"""Recognizes the names of secrets: `db_password`, `hfToken`, and names in the option `secrets`. Imports no torch."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable

_SERVICE = (
    "aws|azure|bitbucket|bot|clearml|comet|discord|docker|github|gitlab|hf|huggingface|mlflow|neptune|npm|openai|pypi"
    "|slack|telegram|wandb"
)
_SECRET_NAME = re.compile(
    r"(.*_)?(passwords?|passwd|pwd|passphrases?|secrets?|credentials?|apikeys?|auth|bearer|cookies?|jwt|pat|session_id"
    r"|webhooks?|webhook_ur[il]|dsn|conn(ection)?_str(ing)?s?"
    rf"|(access|account|api|deploy|encryption|private|secret|signing|ssh|{_SERVICE})_keys?"
    rf"|(access|api|auth|bearer|deploy|jwt|oauth|private|refresh|secret|security|session|webhook|{_SERVICE})_token)|token"
)
"""The ends of names that say so, in words: `pad_token`, `sort_key` and `author` are not among them."""
_KEY = re.compile(r"(?=.*\d)[\w.~+/=:,'\"-]{16,}", re.ASCII)
"""A value of another name that ends with `_token` must look like this. Others are tokens of a text: `<|pad|>`. With
commas and quotes, because several values of a sweep may be typed."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_HINTS = (
    "pass|pwd|secret|credential|key|token|auth(?!or)|bearer|cookie|jwt|pat(?![a-z])|hook|session|dsn"
    "|conn(?:ection)?[_-]?str|notify"
)

Rule = Callable[[object], bool]
"""Whether a value of a name is a secret."""

_names: tuple[str, ...] = ()
"""Names of secrets that the config adds."""
_hint = re.compile(_HINTS)
"""Is found in each text, in lower case, with the name of a secret."""
_lock = threading.Lock()


def name_secrets(names: Iterable[object]) -> None:
    """Set the names that the option `secrets` adds. Values whose names end with the words of one of them are masked.

    Args:
        names: those that have no letters are ignored.
    """
    global _names, _hint
    found = tuple(name for name in names if isinstance(name, str) and _words(name))
    with _lock:
        if found == _names:
            return  # what `looks_secret` has found stays true
        _names = found
        _hint = re.compile("|".join([_HINTS, *(_words(name)[-1] for name in _names)]))
        rule_of.cache_clear()


def secret_names() -> list[str]:
    """Return the names that the option `secrets` adds."""
    return list(_names)


def looks_secret(key: str) -> bool:
    """Return whether a name ends with words that name a secret: `db_password`, `wandb_api_key`, `hfToken`, `token`.

    Args:
        key: a name in a config (also dotted), in the environment or on a command line (`--api-key`).
    """
    return rule_of(key) in (is_value, is_text)


def may_be_secret(key: str) -> bool:
    """Return whether some values of a name are secrets: also of `my_token`, if they look like a key."""
    return rule_of(key) is not never


def names_a_secret(text: str) -> bool:
    """Return False for most texts in which no name is that of a secret."""
    return _hint.search(text.lower()) is not None


def _words(key: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(re.split(r"[./:@]", key)[-1])]


@functools.lru_cache(maxsize=8192)
def rule_of(key: str) -> Rule:
    """Return the function that tells which values of a name are secrets."""
    words = _words(key)
    added = any(words[-len(own) :] == own for own in map(_words, _names))
    is_directory = words == ["pwd"] and key.endswith("PWD")  # the variable of the shell
    is_token = words[-1:] == ["token"]
    if not added and (is_directory or _SECRET_NAME.fullmatch("_".join(words)) is None):
        return _looks_like_key if is_token else never
    return is_text if is_token else is_value


def never(value: object) -> bool:
    """The rule of a name that is not that of a secret."""
    return False


def is_value(value: object) -> bool:
    """The rule of most names of secrets."""
    return isinstance(value, str | int | float)


def is_text(value: object) -> bool:
    """The rule of names of secrets that end with `token`: a number is an id."""
    return isinstance(value, str)


def _looks_like_key(value: object) -> bool:
    """The rule of other names that end with `token`."""
    return isinstance(value, str) and _KEY.fullmatch(value) is not None

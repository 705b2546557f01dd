"""Mask secrets in all that is written, printed and sent. Imports no torch.

A value is a secret if the words at the end of its key say so (`looks_secret`). It is masked at its key in configs,
overrides and command lines. Known secrets, and passwords in URLs, are masked in any text. Known are the values of such
keys that `remember` was given, and of such environment variables, from 8 characters on.

All patterns take linear time: no match starts inside a word, and repetitions are possessive or bounded.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

MASK = "***"

_SERVICE = (
    "aws|azure|bitbucket|bot|clearml|comet|discord|docker|github|gitlab|hf|huggingface|mlflow|neptune|npm|openai|pypi"
    "|slack|telegram|wandb"
)
_NAME = re.compile(
    r"(.*_)?(passwords?|passwd|pwd|passphrases?|secrets?|credentials?|apikeys?|auth|bearer|cookies?|jwt|session_id"
    r"|webhooks?|webhook_ur[il]|dsn|conn(ection)?_str(ing)?s?"
    rf"|(access|account|api|deploy|encryption|private|secret|signing|ssh|{_SERVICE})_keys?"
    rf"|(access|api|auth|bearer|deploy|jwt|oauth|private|refresh|secret|security|session|webhook|{_SERVICE})_token)|token"
)
"""The ends of keys that name a secret, in words: `pad_token`, `sort_key` and `author` are not among them."""
_TOKEN = re.compile(r"(?=.*\d)[\w.~+/=:,'\"-]{16,}", re.ASCII)
"""The value of another key that ends with `_token` must look like this. Others are tokens of a text: `<|pad|>`. With
commas and quotes, because several values of a sweep may be typed."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

_SHORTEST = 8
"""Characters of a known secret that is searched for in text. A shorter one may be part of ordinary words."""
_LONGEST_WORD = 15
"""Letters of a value in a config that may be an ordinary word, and is not searched for in text."""
_PLAIN = re.compile(r"|\?\?\?|\*\*\*|(?i:none|null|true|false)|\$\{.*\}", re.DOTALL)
"""Strings that are never secrets."""
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?")
_OVERRIDE = re.compile(r"(?P<key>(?:\+{1,2}|~)?(?P<name>[\w./@-]+)=)(?P<value>.+)", re.DOTALL)
_ENTRY = re.compile(
    r"(?<![\w.-])(?P<key>(?P<name>[A-Za-z_][\w.-]*+)[ ]*+:[ ]*+)"
    r"(?P<value>'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"|(?!\$\{)[^\s,{}\[\]'\"][^,{}\[\]]*+)"
)
"""An entry of a mapping in an override: `+hooks.mine={api_key: abc}`."""
_URL = re.compile(r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{1,20}+://[^\s/@:'\"]{0,200}+:)(?!\$?\{|[<%])([^\s/'\"]{1,500})@")

_known: tuple[str, ...] = ()
"""Values that `remember` was given, in every form. Replaced and never changed, because other threads read it."""
_lock = threading.Lock()


@functools.lru_cache(maxsize=8192)
def looks_secret(key: str) -> bool:
    """Return whether a key ends with words that name a secret: `db_password`, `wandb_api_key`, `hfToken`, `token`.

    Args:
        key: a name in a config (also dotted), in the environment or on a command line (`--api-key`).
    """
    words = _words(key)
    is_directory = words == ["pwd"] and key.endswith("PWD")  # the variable of the shell
    return not is_directory and _NAME.fullmatch("_".join(words)) is not None


def _words(key: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(re.split(r"[./:@]", key)[-1])]


def _is_secret(key: str, value: object) -> bool:
    """Return whether the value of a key is a secret. A number whose key ends with `token` is an id."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or _PLAIN.fullmatch(str(value)):
        return False
    if _words(key)[-1:] != ["token"]:
        return looks_secret(key)
    return isinstance(value, str) and (looks_secret(key) or _TOKEN.fullmatch(value) is not None)


def _is_secret_as_typed(key: str, value: str) -> bool:
    return _is_secret(key, 0 if _NUMBER.fullmatch(value) else value)


def _key_below(name: object, above: str) -> str:
    """Return the key that decides about an entry of a mapping: in `credentials`, that of the mapping."""
    is_covered = looks_secret(above) and _words(above)[-1] != "token" and not str(name).startswith("_")
    return above if is_covered else str(name)


def masked(config: Any) -> Any:
    """Return the same structure with each secret replaced by `***`.

    A mapping whose key names a secret (`credentials`) is masked as a whole, except for `_target_` and the like; one
    named `token` is not.

    Args:
        config: a plain container, resolved or not.
    """
    return _masked(config, "", _known_values())


def _masked(node: Any, key: str, known: Sequence[str]) -> Any:
    if isinstance(node, Mapping):
        return {name: _masked(value, _key_below(name, key), known) for name, value in node.items()}
    if isinstance(node, list | tuple):
        return [_masked(item, key, known) for item in node]
    if _is_secret(key, node):
        return MASK
    return _mask_override(node, known) if isinstance(node, str) else node


def mask_text(text: str) -> str:
    """Return a message, traceback, patch or other text with known secrets, and passwords in URLs, as `***`."""
    return _mask_text(text, _known_values())


def _mask_text(text: str, known: Sequence[str]) -> str:
    for value in known:
        if value in text:
            text = text.replace(value, MASK)
    return _URL.sub(rf"\1{MASK}@", text) if "://" in text else text


def mask_overrides(overrides: Iterable[str]) -> list[str]:
    """Return overrides as typed, `+hooks.mine.api_key=…`, with each secret replaced by `***`."""
    known = _known_values()
    return [_mask_override(line, known) for line in overrides]


def _mask_override(line: str, known: Sequence[str]) -> str:
    found = _OVERRIDE.fullmatch(line)
    if found is not None:
        if _is_secret_as_typed(found["name"], found["value"]):
            return found["key"] + MASK
        if found["value"][0] in "{[":
            line = _ENTRY.sub(_mask_entry, line)
    return _mask_text(line, known)


def _mask_entry(found: re.Match[str]) -> str:
    return found["key"] + MASK if _is_secret_as_typed(found["name"], found["value"].strip()) else found[0]


_VARIABLE = "HYDRALOOP_PRIVATE"
"""Environment variable with the secrets in the overrides of a process that this one starts."""


def masked_lists(overrides: Mapping[str, list[str]]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return lists of overrides with masked secrets, and the environment variable with the secrets, if there are any.

    Others can read the arguments of a process, but not its environment.
    """
    shown = {name: mask_overrides(lines) for name, lines in overrides.items()}
    secrets = [
        (name, number, line)
        for name, lines in overrides.items()
        for number, line in enumerate(lines)
        if shown[name][number] != line
    ]
    return shown, {_VARIABLE: json.dumps(secrets)} if secrets else {}


def put_secrets_back(overrides: Any) -> bool:
    """Give masked lists their secrets. The environment variable is removed. Return whether there was one."""
    secrets = json.loads(os.environ.pop(_VARIABLE, "[]"))
    for name, number, line in secrets:
        overrides[name][number] = line
    return bool(secrets)


def mask_command(arguments: Sequence[str]) -> str:
    """Return a command line, quoted as a shell needs it, with each secret replaced by `***`.

    Args:
        arguments: as in `sys.argv`: overrides, and flags whose value is the next argument (`--api-key …`).
    """
    shown: list[str] = []
    flag = ""
    known = _known_values()
    for line in arguments:
        is_secret = not line.startswith("-") and _is_secret(flag, line)
        shown.append(MASK if is_secret else _mask_override(line, known))
        flag = line if line.startswith("--") and "=" not in line else ""
    return shlex.join(shown).replace(f"'{MASK}'", MASK)


def remember(config: Any) -> None:
    """Make a config's secrets known in this process, so that they are masked in any text.

    Args:
        config: a plain container, resolved. Values of fewer than 8 characters and words of up to 15 letters are not
            searched for in text; they are masked only at their key.
    """
    global _known
    values = [value for value in _secrets(config, "") if not (value.isalpha() and len(value) <= _LONGEST_WORD)]
    found = {form for value in values if len(value) >= _SHORTEST for form in _forms(value)}
    with _lock:
        _known = tuple(found.union(_known))


def remember_overrides(overrides: Iterable[str]) -> None:
    """Make the secrets of overrides (`key=value`, or `key=value,value`) known, before the config exists."""
    for found in filter(None, map(_OVERRIDE.fullmatch, overrides)):
        for value in {found["value"], *found["value"].split(",")}:
            if not (_NUMBER.fullmatch(value) and _words(found["name"])[-1:] == ["token"]):
                remember({found["name"]: value.strip("'\"")})


def _secrets(node: Any, key: str) -> Iterator[str]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _secrets(value, _key_below(name, key))
    elif isinstance(node, list | tuple):
        for item in node:
            yield from _secrets(item, key)
    elif _is_secret(key, node):
        yield str(node)
    if isinstance(node, str):
        yield from (found[2] for found in _URL.finditer(node))


@functools.lru_cache(maxsize=256)
def _forms(value: str) -> frozenset[str]:
    """Return a value as it is, and as written in URLs, JSON and Python."""
    return frozenset((value, quote(value, safe=""), json.dumps(value)[1:-1], repr(value)[1:-1]))


class _Known(NamedTuple):
    """All known secrets, and what they were found in."""

    remembered: tuple[str, ...]
    environment: Mapping[Any, Any]
    values: tuple[str, ...]


_found = _Known((), {}, ())


def _known_values() -> tuple[str, ...]:
    """Return all known secrets, the longest first, since one may contain another."""
    global _found
    last, remembered = _found, _known
    raw = getattr(os.environ, "_data", os.environ)  # to compare the public mapping takes 30 us, and this 1 us
    if last.remembered is not remembered or last.environment != raw:
        environment = dict(raw)
        values = {*remembered, *_of_environment(environment)}
        last = _found = _Known(remembered, environment, tuple(sorted(values, key=len, reverse=True)))
    return last.values


def _of_environment(environment: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the secrets of environment variables in every form."""
    for name, value in zip(map(os.fsdecode, environment), map(os.fsdecode, environment.values()), strict=True):
        named = looks_secret(name) or name.upper().endswith("_TOKEN")  # MLFLOW_TRACKING_TOKEN, AWS_SESSION_TOKEN
        is_word = value.isalpha() and looks_secret(value)  # the value `password` would be found everywhere
        is_searchable = len(value) >= _SHORTEST and not is_word and not _PLAIN.fullmatch(value)
        if named and is_searchable and not (value.startswith("/") and os.path.exists(value)):
            yield from _forms(value)

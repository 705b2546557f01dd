"""Mask secrets in configs, overrides, command lines, messages and patches before they are written. Imports no torch.

A value is a secret if its name ends with words that say so (`looks_secret`), if it is the password or the signature in
a URL, or if it is a known secret. Known are the values that `remember` was given with such a name, and those of
environment variables with such a name. The value itself is not examined, with these exceptions: None, bools and
interpolations are never secrets, and a number whose name ends with `token` is an id.

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
from typing import Any
from urllib.parse import quote

MASK = "***"

_SECRET_NAME = re.compile(
    r"(.*_)?(passwords?|passwd|secrets?|credentials?|apikeys?|auth|bearer|cookies?|jwt|pat|webhooks?|session_id"
    r"|webhook_url|(access|api|private|secret)_keys?|(access|api|auth|bearer|refresh|hf|github|wandb)_token)|token"
)
"""The ends of names that say so, in words: `pad_token`, `sort_key` and `author` are not among them."""
_SHORTEST = 8
"""Characters of a known secret that is searched for in text. A shorter one may be part of ordinary words."""
_LONGEST_WORD = 15
"""Letters of a value in a config that may be an ordinary word, and is not searched for in text."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_PLAIN = re.compile(r"|\?\?\?|\*\*\*|(?i:none|null|true|false)|\$\{.*\}", re.DOTALL)
"""Strings that are never secrets."""
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?")
_OVERRIDE = re.compile(r"(?P<key>(?:\+{1,2}|~)?(?P<name>[\w./@-]+)=)(?P<value>.+)", re.DOTALL)
_URL = re.compile(r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{1,20}+://[^\s/@:'\"]{0,200}+:)(?!\$?\{|[<%])([^\s/'\"]{1,500})@")
_SIGNED = re.compile(
    r"(?:(?<=[?&])|(?<=&amp;)|(?<=\\u0026))((?:[a-z-]{0,20}-)?(?:signature|security-token)|sig)="
    r"(?!\$?\{|%[(s])[^\s&\"'<>]+",
    re.IGNORECASE,
)
"""The part of a presigned URL with which anybody can use it. In messages, such a URL may be without its host, and its
`&` is `&amp;` in XML and `\\u0026` in some JSON."""
_HINTS = "pass|secret|credential|key|token|auth(?!or)|bearer|cookie|jwt|pat(?![a-z])|webhook|session"
_OPTION = "secrets"
"""The option of the config with names of secrets."""
_NAME = re.compile(
    r"(?<![\w.-])(?P<name>-{0,2}[A-Za-z_][\w.-]*+)(?P<separator>\\*+[\"']?\]?[ \t]*+[:=](?![:=])[ \t]*+)"
)
_QUOTED = re.compile(r"[rbfRBF]{0,2}(?P<quote>\\*[\"'])(?P<value>(?:[^\\\n]|\\.)*?)(?P=quote)")
_BARE = re.compile(r"(?![{\[($<%])[^\s\"'`,;&()}\]]++(?:,(?![^\s,=:]*[=:])[^\s\"'`,;&()}\]]++)*+")
"""A value up to the next argument: `a,b` are values of a sweep, `a,n=1` ends at the comma. Not a placeholder."""
_END = re.compile(r"[ \t]*+(?:[,}\])#\n]|\Z)")
_SETTINGS = re.compile(r"diff --git .*\.(?:ya?ml|json|toml|ini|cfg|env)\"?\n")

_known: tuple[str, ...] = ()
"""Values that `remember` was given, in every form. Replaced and never changed, because other threads read it."""
_names: tuple[str, ...] = ()
"""Names of secrets that the config adds."""
_hint = re.compile(_HINTS, re.IGNORECASE)
"""Is found in each text with the name of a secret."""
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
        _hint = re.compile("|".join([_HINTS, *(_words(name)[-1] for name in _names)]), re.IGNORECASE)
        looks_secret.cache_clear()


def secret_names() -> list[str]:
    """Return the names that the option `secrets` adds."""
    return list(_names)


@functools.lru_cache(maxsize=8192)
def looks_secret(key: str) -> bool:
    """Return whether a name ends with words that name a secret: `db_password`, `wandb_api_key`, `hfToken`, `token`.

    Args:
        key: a name in a config (also dotted), in the environment or on a command line (`--api-key`).
    """
    words = _words(key)
    added = any(words[-len(own) :] == own for own in map(_words, _names))
    return added or _SECRET_NAME.fullmatch("_".join(words)) is not None


def _words(key: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(re.split(r"[./:@]", key)[-1])]


def _secret_types(key: str) -> tuple[type, ...]:
    """Return the types of values that are secrets under a name: for `token` only strings, since a number is an id."""
    if not looks_secret(key):
        return ()
    return (str,) if _words(key)[-1] == "token" else (str, int, float)


def masked(config: Any) -> Any:
    """Return the same structure with each secret replaced by `***`.

    A mapping whose name is that of a secret (`credentials`) is masked as a whole, except for `_target_` and the like;
    one named `token` is not.

    Args:
        config: a plain container, resolved or not.
    """
    return _masked(config, tuple(_known_values()), ())


def _masked(node: Any, known: Sequence[str], types: tuple[type, ...]) -> Any:
    """Mask a node, in which values of `types` are secrets."""
    if isinstance(node, Mapping):
        return {name: _masked(value, known, _types_below(name, value, types)) for name, value in node.items()}
    if isinstance(node, list | tuple):
        return [_masked(item, known, types) for item in node]
    if _is_secret(node, types):
        return MASK
    return _mask_override(node, known) if isinstance(node, str) else node


def _types_below(name: object, value: Any, above: tuple[type, ...]) -> tuple[type, ...]:
    """Return the types of values that are secrets in an entry of a mapping, by its name or by `above`."""
    if above and not str(name).startswith("_"):
        return above
    if name == _OPTION and isinstance(value, list) and all(item in _names for item in value):
        return ()
    types = _secret_types(str(name))
    return types if int in types or not isinstance(value, Mapping) else ()


def _is_secret(value: Any, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool) and not _PLAIN.fullmatch(str(value))


def mask_text(text: str) -> str:
    """Return a message, traceback or YAML text with each secret replaced by `***`.

    Values after the name of a secret are `api_key=…`, `"api_key": "…"`, and `api_key: …` if the value ends the line or
    the entry.
    """
    return _mask_text(text, _known_values())


def mask_patch(diff: str) -> str:
    """Return a git diff with each secret replaced by `***`.

    In code, only known secrets, and passwords and signatures in URLs, are masked, because a patch with `token=***` does
    not apply. Settings files (YAML, JSON, TOML, ini, .env) are masked like other text.
    """
    known = tuple(_known_values())
    files = re.split(r"(?m)^(?=diff --git )", diff)
    return "".join(_mask_text(one, known) if _SETTINGS.match(one) else _mask_known(one, known) for one in files)


def _mask_known(text: str, known: Iterable[str]) -> str:
    for value in known:
        if value in text:
            text = text.replace(value, MASK)
    text = _SIGNED.sub(rf"\1={MASK}", text) if "=" in text else text
    return _URL.sub(rf"\1{MASK}@", text) if "://" in text else text


def _mask_text(text: str, known: Iterable[str], *, colon: bool = True) -> str:
    text = _mask_known(text, known)
    if not _hint.search(text):
        return text
    parts, done = [], 0
    for found in _NAME.finditer(text):
        if found.start() >= done and looks_secret(found["name"]):
            span = _value(text, found, colon=colon)
            if span is not None:
                parts += [text[done : span[0]], MASK]
                done = span[1]
    return "".join([*parts, text[done:]])


def _value(text: str, name: re.Match[str], *, colon: bool) -> tuple[int, int] | None:
    """Return the span of the value after the name of a secret; None without a value, or if it is not a secret."""
    quoted = _QUOTED.match(text, name.end())
    if quoted is not None:
        return None if _PLAIN.fullmatch(quoted["value"]) else quoted.span("value")
    blank = name["separator"][-1].isspace()
    if "=" in name["separator"]:
        is_value = not blank  # `token = next(tokens)` is code
    elif blank:
        is_value = colon and "." not in name["name"]  # `hooks.mine.api_key: missing` is a message
    else:
        is_value = colon and text[max(0, name.start() - 1)] in "{,"
    bare = _BARE.match(text, name.end()) if is_value else None
    if bare is None or _stays(name["name"], bare[0]):
        return None
    sentence = ":" in name["separator"] and blank and _END.match(text, bare.end()) is None
    return None if sentence else bare.span()


def _stays(name: str, value: str) -> bool:
    """Return whether a value without quotes is not a secret, although its name is that of one."""
    is_number = _NUMBER.fullmatch(value) is not None
    return _PLAIN.fullmatch(value) is not None or (is_number and int not in _secret_types(name))


def mask_overrides(overrides: Iterable[str]) -> list[str]:
    """Return overrides as typed, `+hooks.mine.api_key=…`, with each secret replaced by `***`."""
    known = tuple(_known_values())
    return [_mask_override(line, known) for line in overrides]


def _mask_override(line: str, known: Sequence[str]) -> str:
    found = _OVERRIDE.fullmatch(line)
    if found is not None and found["name"] == _OPTION and set(_listed(found["value"])) <= set(_names):
        return line
    if found is None or not looks_secret(found["name"]):
        return _mask_text(line, known, colon=found is not None and found["value"][0] in "{[")
    return line if _stays(found["name"], found["value"]) else found["key"] + MASK


def mask_command(arguments: Sequence[str]) -> str:
    """Return a command line, quoted as a shell needs it, with each secret replaced by `***`.

    Args:
        arguments: as in `sys.argv`: overrides, and flags whose value is the next argument (`--api-key …`).
    """
    shown, secret, known = [], False, tuple(_known_values())
    for line in arguments:
        shown.append(MASK if secret and not line.startswith("-") else _mask_override(line, known))
        secret = line.startswith("--") and "=" not in line and looks_secret(line)
    return shlex.join(shown).replace(f"'{MASK}'", MASK)


def remember(config: Any) -> None:
    """Make a config's secrets known in this process, so that they are masked in any text.

    Args:
        config: a plain container, resolved. Values of fewer than 8 characters and words of up to 15 letters are not
            searched for in text; they are masked only after their name.
    """
    global _known
    found = {form for value in _secrets(config, ()) for form in _forms(value)}
    with _lock:
        _known = tuple(found.union(_known))


def remember_overrides(overrides: Iterable[str]) -> None:
    """Make the secrets of overrides (`key=value`) known, and the names in `secrets=[…]`, before the config exists."""
    parts = [found for line in overrides if (found := _OVERRIDE.fullmatch(line))]
    for found in parts:
        if found["name"] == _OPTION:
            name_secrets(_listed(found["value"]))
    for found in parts:
        if found["name"] != _OPTION and not _stays(found["name"], found["value"]):
            remember({found["name"]: found["value"].strip("'\"")})


def _listed(value: str) -> list[str]:
    """Return the items of a typed list, `[a,b]`."""
    return re.findall(r"[^\[\]\s,'\"]+", value)


def _secrets(node: Any, types: tuple[type, ...]) -> Iterator[str]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _secrets(value, _types_below(name, value, types))
    elif isinstance(node, list | tuple):
        for item in node:
            yield from _secrets(item, types)
    else:
        values = [found[2] for found in _URL.finditer(node)] if isinstance(node, str) else []
        values += [str(node)] if _is_secret(node, types) else []
        words = [value for value in values if value.isalpha() and len(value) <= _LONGEST_WORD]
        yield from (value for value in values if value not in words and _is_searchable(value))


def _is_searchable(value: str) -> bool:
    """Return whether a secret is searched for in text. The value `password` is not: it would be found everywhere."""
    word = value.isalpha() and looks_secret(value)
    return len(value) >= _SHORTEST and not word and not _PLAIN.fullmatch(value)


@functools.lru_cache(maxsize=256)
def _forms(value: str) -> frozenset[str]:
    """Return a value as it is, and as written in URLs, JSON and Python."""
    return frozenset((value, quote(value, safe=""), json.dumps(value)[1:-1], repr(value)[1:-1]))


def _known_values() -> list[str]:
    """Return all known secrets, the longest first, since one may contain another."""
    found = set(_known)
    for name, value in os.environ.items():
        named = looks_secret(name) or name.upper().endswith("_TOKEN")  # MLFLOW_TRACKING_TOKEN, AWS_SESSION_TOKEN
        if named and _is_searchable(value) and not (value.startswith("/") and os.path.exists(value)):
            found |= _forms(value)
    return sorted(found, key=len, reverse=True)

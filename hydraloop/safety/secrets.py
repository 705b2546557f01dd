"""Mask secrets in configs, overrides, command lines, messages and patches before they are written. Imports no torch.

A value is a secret if its name ends with words that say so (`looks_secret`), if it is the password or the signature in
a URL or the path of a webhook, or if it is a known secret. Known are the values that `remember` was given with such a
name, and those of environment variables with such a name. The value itself is not examined, with these exceptions:
None, bools and interpolations are never secrets, and a number whose name ends with `token` is an id. Most names that
end with `_token` are ordinary (`pad_token`), so a text of such a name must also look like a key.

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

from hydraloop.safety.secret_names import (
    Rule,
    is_value,
    looks_secret,
    may_be_secret,
    name_secrets,
    names_a_secret,
    never,
    rule_of,
    secret_names,
)

MASK = "***"

_SHORTEST = 8
"""Characters of a known secret that is searched for in text. A shorter one may be part of ordinary words."""
_LONGEST_WORD = 15
"""Letters of a value in a config that may be an ordinary word, and is not searched for in text."""
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
_WEB = re.compile(
    r"(?<![a-z0-9+.-])https?://(?P<host>[^\s/\"'<>\\]{1,200}+)/(?P<path>[^\s\"'<>\\`,;)}\]]{1,2000}+)", re.IGNORECASE
)
_HOOK = re.compile(r"(?<![^/])(?:(?:web)?hooks?[a-z0-9]{0,2}/|bot(?=\d+:))")
_HOOKS_KEY = re.compile(r"(?<![\w-])(?=[A-Za-z_-]*\d)[\w-]{12,}")
"""A webhook has such a part after `_HOOK` in its path. The address of a page about webhooks has none."""
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
_lock = threading.Lock()


def masked(config: Any) -> Any:
    """Return the same structure with each secret replaced by `***`.

    A mapping whose name is that of a secret (`credentials`) is masked as a whole, except for `_target_` and the like;
    one named `token` is not.

    Args:
        config: a plain container, resolved or not.
    """
    return _masked(config, _known_values(), never)


def _masked(node: Any, known: Sequence[str], rule: Rule) -> Any:
    if isinstance(node, Mapping):
        return {name: _masked(value, known, _secret_below(name, value, rule)) for name, value in node.items()}
    if isinstance(node, list | tuple):
        return [_masked(item, known, rule) for item in node]
    if _is_secret(node, rule):
        return MASK
    return _mask_override(node, known) if isinstance(node, str) else node


def _secret_below(name: object, value: Any, above: Rule) -> Rule:
    """Return which values are secrets in an entry of a mapping, by its name or by `above`."""
    if above is not never and not str(name).startswith("_"):
        return above
    if name == _OPTION and isinstance(value, list) and all(item in secret_names() for item in value):
        return never
    found = rule_of(str(name))
    return found if found is is_value or not isinstance(value, Mapping) else never


def _is_secret(value: Any, rule: Rule) -> bool:
    return rule(value) and not isinstance(value, bool) and not _PLAIN.fullmatch(str(value))


def mask_text(text: str) -> str:
    """Return a message, traceback or YAML text with each secret replaced by `***`.

    Values after the name of a secret are `api_key=…`, `"api_key": "…"`, and `api_key: …` if the value ends the line or
    the entry.
    """
    return _mask_text(text, _known_values())


def mask_patch(diff: str) -> str:
    """Return a git diff with each secret replaced by `***`.

    In code, only known secrets, and secrets in URLs, are masked, because a patch with `token=***` does not apply.
    Settings files (YAML, JSON, TOML, ini, .env) are masked like other text.
    """
    known = _known_values()
    files = re.split(r"(?m)^(?=diff --git )", diff)
    return "".join(_mask_text(one, known) if _SETTINGS.match(one) else _mask_known(one, known) for one in files)


def _mask_known(text: str, known: Iterable[str]) -> str:
    for value in known:
        if value in text:
            text = text.replace(value, MASK)
    if "=" in text and ("?" in text or "&" in text or "u0026" in text):
        text = _SIGNED.sub(rf"\1={MASK}", text)
    if "://" in text:
        text = _URL.sub(rf"\1{MASK}@", text)
        text = _without(text, _webhooks(text))
    return text


def _webhooks(text: str) -> Iterator[tuple[int, int]]:
    """Yield the span of the secret part of each URL of a webhook: anybody who knows the URL can send."""
    for found in _WEB.finditer(text) if "hook" in text or "bot" in text else ():
        host, start = found["host"].lower(), found.start("path")
        if not host.startswith("hooks.") and "webhook" not in host:
            hook = _HOOK.search(found["path"])
            if hook is None or _HOOKS_KEY.search(found["path"], hook.end()) is None:
                continue
            start += hook.end()
        yield start, found.end()


def _without(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """Return a text with spans replaced by `***`."""
    parts, done = [], 0
    for start, end in spans:
        parts += [text[done:start], MASK]
        done = end
    return "".join([*parts, text[done:]])


def _mask_text(text: str, known: Iterable[str], *, colon: bool = True) -> str:
    text = _mask_known(text, known)
    return _without(text, _named(text, colon=colon)) if names_a_secret(text) else text


def _named(text: str, *, colon: bool) -> Iterator[tuple[int, int]]:
    """Yield the span of each value after the name of a secret."""
    done = 0
    for found in _NAME.finditer(text):
        if found.start() >= done and may_be_secret(found["name"]):
            span = _value(text, found, colon=colon)
            if span is not None:
                yield span
                done = span[1]


def _value(text: str, name: re.Match[str], *, colon: bool) -> tuple[int, int] | None:
    """Return the span of the value after the name of a secret; None without a value, or if it is not a secret."""
    quoted = _QUOTED.match(text, name.end())
    if quoted is not None:
        return quoted.span("value") if _is_secret(quoted["value"], rule_of(name["name"])) else None
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
    """Return whether a value without quotes is not a secret, although its name may be that of one."""
    return not _is_secret(0 if _NUMBER.fullmatch(value) else value, rule_of(name))


def mask_overrides(overrides: Iterable[str]) -> list[str]:
    """Return overrides as typed, `+hooks.mine.api_key=…`, with each secret replaced by `***`."""
    known = _known_values()
    return [_mask_override(line, known) for line in overrides]


def _mask_override(line: str, known: Sequence[str]) -> str:
    found = _OVERRIDE.fullmatch(line)
    if found is not None and found["name"] == _OPTION and set(_listed(found["value"])) <= set(secret_names()):
        return line
    if found is not None and not _stays(found["name"], found["value"]):
        return found["key"] + MASK
    return _mask_text(line, known, colon=found is not None and found["value"][0] in "{[")


def mask_command(arguments: Sequence[str]) -> str:
    """Return a command line, quoted as a shell needs it, with each secret replaced by `***`.

    Args:
        arguments: as in `sys.argv`: overrides, and flags whose value is the next argument (`--api-key …`).
    """
    shown: list[str] = []
    rule: Rule = never
    known = _known_values()
    for line in arguments:
        is_secret = not line.startswith("-") and rule(line)
        shown.append(MASK if is_secret else _mask_override(line, known))
        rule = rule_of(line) if line.startswith("--") and "=" not in line else never
    return shlex.join(shown).replace(f"'{MASK}'", MASK)


def remember(config: Any) -> None:
    """Make a config's secrets known in this process, so that they are masked in any text.

    Args:
        config: a plain container, resolved. Values of fewer than 8 characters and words of up to 15 letters are not
            searched for in text; they are masked only after their name.
    """
    global _known
    found = {form for value in _secrets(config, never) for form in _forms(value)}
    with _lock:
        _known = tuple(found.union(_known))


def remember_overrides(overrides: Iterable[str]) -> None:
    """Make the secrets of overrides (`key=value`) known, and the names in `secrets=[…]`, before the config exists."""
    parts = [found for line in overrides if (found := _OVERRIDE.fullmatch(line))]
    for found in parts:
        if found["name"] == _OPTION:
            name_secrets(_listed(found["value"]))
    for found in parts:
        is_id = _NUMBER.fullmatch(found["value"]) and _stays(found["name"], found["value"])
        if found["name"] != _OPTION and not is_id:
            remember({found["name"]: found["value"].strip("'\"")})


def _listed(value: str) -> list[str]:
    """Return the items of a typed list, `[a,b]`."""
    return re.findall(r"[^\[\]\s,'\"]+", value)


def _secrets(node: Any, rule: Rule) -> Iterator[str]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _secrets(value, _secret_below(name, value, rule))
    elif isinstance(node, list | tuple):
        for item in node:
            yield from _secrets(item, rule)
    else:
        values = [found[2] for found in _URL.finditer(node)] if isinstance(node, str) else []
        values += [node[start:end] for start, end in _webhooks(node)] if isinstance(node, str) else []
        values += [str(node)] if _is_secret(node, rule) else []
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


class _Known(NamedTuple):
    """All known secrets, and what they were found in."""

    remembered: tuple[str, ...]
    names: Sequence[str]
    environment: Mapping[Any, Any]
    values: tuple[str, ...]


_found = _Known((), (), {}, ())


def _known_values() -> tuple[str, ...]:
    """Return all known secrets, the longest first, since one may contain another."""
    global _found
    last, remembered, names = _found, _known, secret_names()
    raw = getattr(os.environ, "_data", os.environ)  # to compare the public mapping takes 30 us, and this 1 us
    if last.remembered is not remembered or last.names != names or last.environment != raw:
        environment = dict(raw)
        values = {*remembered, *_of_environment(environment)}
        last = _found = _Known(remembered, names, environment, tuple(sorted(values, key=len, reverse=True)))
    return last.values


def _of_environment(environment: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the secrets of environment variables in every form."""
    for name, value in zip(map(os.fsdecode, environment), map(os.fsdecode, environment.values()), strict=True):
        named = looks_secret(name) or name.upper().endswith("_TOKEN")  # MLFLOW_TRACKING_TOKEN, AWS_SESSION_TOKEN
        if named and _is_searchable(value) and not (value.startswith("/") and os.path.exists(value)):
            yield from _forms(value)

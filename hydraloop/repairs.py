"""The command line that a remedy asks for: the arguments as typed, with the mistake repaired. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydraloop.errors import Remedy, UserError

CODES = {
    "unknown_flag": r"no such flag|^unrecognized arguments",
    "missing_plus": r"does not exist yet|not in the defaults list",
    "extra_plus": r"exists already|selected twice",
    "unknown_key": r"no such (key|option)|no group, |takes no argument|which ha(s|ve) no|^it does not exist$"
    r"|^no run has",
    "unknown_option": r"^there is no (option|hook|priority|ema_type|metric|optimizer|split) |is unknown|^invalid choice"
    r"|is not (one of|an option)",
    "not_selected": r"is not selected|is in the group",
    "needs_multirun": r"not a sweep$|is a sweep$",
    "wrong_type": r"could not be converted|not a valid|^Invalid (type|value) assigned|incompatible with|does not fit",
    "out_of_range": r"is below|not above|out of range|neither a number|not a time|^cannot be ",
    "bad_syntax": r"is not key=value|has no key$|is not a condition|be part of a condition",
    "not_installed": r"is not installed",
    "missing_value": r"has no value|lacks this key|^there is no (model|training data)|arguments are required",
    "not_found": r"holds no|n(ot|either) a run directory|^there is no (file|checkpoint|folder|log|project)"
    r"|does not exist|No such file",
    "refused": r"may not|is refused|is not trusted|outside|not on the list",
}
"""The kinds of mistakes, and what their problems say. The first pattern that is found counts."""


def command(called: Sequence[str], argv: Sequence[str], key: str | None, remedy: str) -> list[str] | None:
    """Return the command that a remedy asks for; None if only a person can tell.

    Args:
        called: how hydraloop was called, without arguments.
        argv: the arguments.
        key: of the mistake.
    """
    if not isinstance(remedy, Remedy):
        return None
    if remedy.command:
        return list(remedy.command)
    words = argv if remedy.word is None else _with_word(argv, key or "", *remedy.word)
    places = [index for index, word in enumerate(words) if {word, _name(word)} & {*remedy.leave_out}]
    kept = [word for index, word in enumerate(words) if index not in places]
    added = []
    for new in remedy.add:
        same = [index for index, word in enumerate(kept) if {"="} <= {*new} & {*word} and _name(word) == _name(new)]
        if same and new not in remedy.leave_out:  # otherwise it is one value of an axis of the sweep
            kept[same[0]] = new
        elif not same:
            added.append(new)
    at = min([*places, len(kept)])
    kept[at:at] = added
    return None if kept == [*argv] else [*called, *kept]


def _with_word(argv: Sequence[str], key: str, wrong: str, right: str) -> list[str]:
    """Return the arguments with another word: an argument, a part of the key, or a part of the key's value."""
    is_name = key == wrong or key.endswith(f".{wrong}")
    found = [_changed(word, key, wrong, right, is_name=is_name) for word in argv]
    if found != [*argv] or is_name or not key:
        return found
    typed = [index for index, word in enumerate(argv) if _name(word) == key and "=" in word]
    for index in typed:
        found[index] = f"{argv[index].partition('=')[0]}={right}"
    return found if typed else [*argv, f"{key}={right}"]


def _changed(argument: str, key: str, wrong: str, right: str, *, is_name: bool) -> str:
    if argument == wrong or (wrong.startswith("+") and argument.startswith(wrong)):
        return right + argument[len(wrong) :]
    name, equals, value = argument.partition("=")
    own = _name(argument)
    if own == key and is_name:
        return f"{name[: len(name) - len(wrong)]}{right}{equals}{value}"
    if own != key and not key.startswith((f"{own}.", f"{own}[")):
        return argument
    old, new = (text.rpartition(".")[2] if is_name else text for text in (wrong, right))
    if not old:
        return argument
    inside = r"\w" if old[0].isalpha() else r"[\w.]"  # my_project.hooks.MyHok ends with a whole word, 1.0 does not
    return f"{name}{equals}" + re.sub(rf"(?<!{inside}){re.escape(old)}(?!{inside})", lambda _: new, value)


def _name(argument: str) -> str:
    return argument.partition("=")[0].lstrip("+~")


def code_of(error: BaseException) -> str:
    """Return the kind of an error: one of `CODES`, `invalid` for another mistake, `interrupted` or `failed`."""
    if isinstance(error, UserError):
        return next((code for code, pattern in CODES.items() if re.search(pattern, error.problem)), "invalid")
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"

"""Answers a shell that completes a command line: prints the words that may replace the one at the cursor.

The shell runs this file by its path, because importing hydraloop takes longer than an answer. No code of a project
runs: its config files and its script are read.
"""

import glob
import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

_HARMLESS = re.compile(r"[\w./=+~\[\],:@%-]+")
"""Other characters could be a command that the shell runs, in the name of a file from someone else."""
_WITH_VALUE = ("-cn", "-cp", "-cd", "--config-name", "--config-path", "--config-dir")


def main(shell: str, line: str, breaks: str = "") -> None:
    """Print the answer, one word a line.

    Args:
        line: the command, up to the cursor.
        breaks: in bash: characters after which readline begins a word. Only what follows the last one is replaced.
    """
    words, word, is_quoted = _split(line)
    command = _command(words)
    if command is None:
        return
    script, arguments = command
    known = runpy.run_path(str(Path(__file__).with_name("known.py")))["known"](script, arguments)
    found = sorted({one for one in _candidates(known, script, arguments, word) if one.startswith(word)})
    begin = 0 if is_quoted else 1 + max((word.rfind(mark) for mark in breaks), default=-1)
    print("\n".join(one[begin:] for one in found if _HARMLESS.fullmatch(one)))


def _split(line: str) -> tuple[list[str], str, bool]:
    """Return the words before the cursor, the word at the cursor, and whether it has an open quote."""
    for quote in ("", "'", '"'):
        try:
            words = shlex.split(line + quote)
        except ValueError:
            continue
        words += [] if quote or not line[-1:].isspace() else [""]
        return words[:-1], words[-1], bool(quote)
    return [], "", False


def _command(words: list[str]) -> tuple[str, list[str]] | None:
    """Return the script, empty for hydraloop itself, and its arguments. None: it is not a command of hydraloop."""
    if words and os.path.basename(words[0]) == "hydraloop":
        return "", words[1:]
    if words[1:3] == ["-m", "hydraloop"]:
        return "", words[3:]
    is_ours = words[1:] and os.path.isfile(words[1]) and b"hydraloop" in Path(words[1]).read_bytes()
    return (words[1], words[2:]) if is_ours else None


def _candidates(known: dict[str, Any], script: str, arguments: list[str], word: str) -> list[str]:
    command = known["commands"].get(next(iter(arguments), ""))
    if word.startswith("-"):
        return list((command or known)["flags"])
    runs = [run for pattern in known["runs"] for run in glob.glob(pattern)]
    name, equals, _ = word.partition("=")
    key = name.lstrip("+~")
    if command:
        values = command["values"]
        return [f"{key}={one}" for one in values.get(key, [])] if equals else [*runs, *(f"{one}=" for one in values)]
    if equals:
        before = word[: 1 + max(word.rfind(mark) for mark in "=,[")]
        after = [",", "]"] if "[" in word else [""]  # two words, so that the shell does not close a quote
        paths = [f"resume={one}" for one in ("auto", *runs)] if key == "resume" else []
        return [*paths, *(before + option + mark for option in known["groups"].get(key, []) for mark in after)]
    if arguments[-1:] == ["--help"]:
        explained = [f"{group}.{option}" for group, options in known["groups"].items() for option in options]
        names = ["all", *known["groups"], *explained, *(one.removesuffix("=") for one in known["keys"])]
        return [_next_part(one, len(word)) for one in names if one.startswith(word)]
    sign = name[: len(name) - len(key)]
    first = [] if arguments else [*known["commands"]] if not script else ["resume"]
    keys = [*(f"{group}=" for group in known["groups"]), *known["keys"]]
    return first + [sign + _next_part(one, len(key)) for one in keys if one.startswith(key)]


def _next_part(key: str, typed: int) -> str:
    """Return a key up to its next dot: `optimizer.` for `optimizer.lr=`."""
    return key[: key.find(".", typed) + 1 or None]


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The commands: their list for `--help`, and what follows the name of one in a command line."""

from __future__ import annotations

import argparse
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hydraloop.commands.new import templates
from hydraloop.config.arguments import refuse
from hydraloop.errors import UserError, close_names
from hydraloop.files import environment


@dataclass(frozen=True)
class Command:
    """A command, as `--help` shows it."""

    arguments: str
    """As typed; `[…]` can be left out, and `…` repeats. FILE and FOLDER are paths."""
    summary: str
    details: str = ""
    """More sentences for the command's own help."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Arguments that are typed as `key=value`, with their possible values."""


_SPLIT = {"split": "test|val"}
_CHECKPOINT = {"checkpoint": "best|last|FILE"}
_RUN = "RUN is a run directory, outputs/<date>/<run>. key=value changes an option of the run, and +key=value adds one."
_FOLDER = "FOLDER is a sweep, multirun/<date>/<sweep>, or a run, outputs/<date>/<run>."
COMMANDS = {
    "new": Command(
        "FOLDER [--from EXAMPLE]",
        "write a small project",
        "Without --from, it is a classification with a model, data, a hook and a test.",
    ),
    "resume": Command(
        "RUN [key=value …] [--dry-run] [--pdb]",
        "continue a run with its saved config",
        f"{_RUN} RUN may also be a checkpoint file. The run prints each change.",
    ),
    "evaluate": Command(
        "RUN", "print the metrics of a finished run as JSON", f"{_RUN} Nothing is written.", _SPLIT | _CHECKPOINT
    ),
    "predict": Command(
        "RUN",
        "write the predictions of a finished run, in the order of the data",
        _RUN,
        {**_SPLIT, **_CHECKPOINT, "output": "FILE.jsonl|FILE.npz"},
    ),
    "export": Command(
        "RUN",
        "write the model of a finished run for use without hydraloop",
        f"{_RUN} safetensors has the weights, pt2 (torch.export) and onnx the graph of the model.",
        {"format": "safetensors|pt2|onnx", **_CHECKPOINT, "output": "FILE"},
    ),
    "check": Command(
        "[key=value …]",
        "test the data, the model and the task of the project",
        "It trains some iterations in a temporary folder. Exit code: 0 no problem, 1 a problem, 2 a mistake.",
    ),
    "runs": Command(
        "[FOLDER] [--sort METRIC] [--json]",
        "list all runs and jobs of sweeps, the newest first",
        "Without a folder, it looks in outputs/ and multirun/. --sort lists the best first by a metric: accuracy, "
        "loss, test.accuracy. If its name does not say which values are good, the least is the first.",
    ),
    "status": Command("FOLDER [--json]", "print how a sweep or a run is doing", _FOLDER),
    "attach": Command("FOLDER", "show a sweep or a run until it ends", f"{_FOLDER} Ctrl-C leaves it running."),
    "results": Command("SWEEP [--json]", "print the results of a sweep, and write results.csv and results.json"),
    "report": Command(
        "FOLDER … [--output FILE] [--follow]",
        "write a page of HTML about a run or a sweep",
        f"{_FOLDER} Several runs are compared. The page is report.html in the folder; of several runs, in the working "
        "directory. It needs no network. --follow writes it again every 10 s until the sweep or run ends; the page "
        "reloads itself.",
    ),
    "stop": Command(
        "FOLDER [--kill]",
        "let a sweep or a run save and end, and end all of its processes",
        f"{_FOLDER} --kill kills at once; so does a second stop.",
    ),
    "sync": Command(
        "FOLDER …",
        "send trackers the records and files that they do not have",
        f"{_FOLDER} Or it is a folder of them (outputs/). A tracker of a project is only used by its script.",
    ),
}
OF_RUNS = ("resume", "evaluate", "predict", "export")
"""Commands that load a run."""
OF_PROJECTS = (*OF_RUNS, "check")
"""Commands that run the code of a project."""


class Found(NamedTuple):
    """A command in a command line."""

    name: str
    words: list[str]
    """What is typed after the name, without flags."""
    before: list[str]
    """Overrides before the name."""


class OnRun(NamedTuple):
    """The arguments of a command that loads a run."""

    name: str
    run: Path
    own: dict[str, str]
    """The command's own `key=value` arguments."""
    overrides: list[str]
    """Changes of the run's config."""


def find(words: Sequence[str], *, others: bool = False) -> Found | None:
    """Return the command in the words of a command line that are no flags: the first one that is not an override.

    None: there is no command, or a word cannot be the name of one, which `arguments.parse` reports.

    Args:
        others: whether a word may also be a topic of `--help`, or the value of a flag that does not exist.

    Raises:
        UserError: there is no such command.
    """
    for index, word in enumerate(words):
        if "=" in word or word.startswith(("+", "~")):
            continue
        if word in COMMANDS:
            return Found(word, [*words[index + 1 :]], [*words[:index]])
        if others or not re.fullmatch(r"[a-z]+", word):
            return None
        near = close_names(word, COMMANDS, most=1, cutoff=0.7)
        remedy = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(COMMANDS)}. Options are key=value."
        raise UserError(f"there is no command {word}", remedy=remedy)
    return None


def on_run(found: Found, args: argparse.Namespace) -> OnRun:
    """Return the arguments of a command that loads a run.

    Args:
        args: the flags.

    Raises:
        UserError: there is no run, a flag that the command does not take, or an argument without a value.
    """
    name, keys = found.name, COMMANDS[found.name].keys
    command = shlex.join([*environment.script(), name]).replace("python -m hydraloop", "hydraloop")
    if not found.words:
        raise UserError("it needs a run directory", key=name, remedy=f"Write {command} outputs/<date>/<run>.")
    run, *rest = found.words
    overrides, own = [*found.before], dict[str, str]()
    for text in rest:
        key, _, value = text.partition("=")
        if key not in keys and (near := close_names(key, keys, most=1, cutoff=0.8)):
            raise UserError("there is no such argument", key=key, remedy=f"Did you mean {near[0]}={value}?")
        if key not in keys:
            overrides.append(text)
        elif not value:
            raise UserError("it has no value", key=key, remedy=f"Write {key}={keys[key]}, or leave it out.")
        else:
            own[key] = value
    flags = {"--multirun": args.multirun, "--cfg": args.cfg}
    if name != "resume":
        flags |= {"--dry-run": args.dry_run, "--pdb": args.pdb, "--json": args.json}
    wrong = [*args.unknown, *args.config_flags, *(flag for flag, given in flags.items() if given)]
    wrong += ["detach" for line in overrides if line.lstrip("+").startswith("detach=")]
    if wrong and (name_of := wrong[0].strip("-").partition("=")[0]) in keys:
        value = wrong[0].partition("=")[2] or keys[name_of]
        raise UserError("there is no such flag", key=wrong[0], remedy=f"Write it without dashes: {name_of}={value}")
    if wrong:
        remedy = f"Leave it out. {command} --help lists what it takes."
        raise UserError(f"{name} continues in this terminal, with the config of the run", key=wrong[0], remedy=remedy)
    return OnRun(name, Path(run), own, overrides)


def viewed(name: str, words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command that runs no code of a project. `Command.arguments` is their grammar.

    Args:
        words: all that is typed except for the name.

    Raises:
        UserError: a mistake in them.
    """
    usage = COMMANDS[name].arguments
    parser = argparse.ArgumentParser(prog=name, add_help=False, allow_abbrev=False)
    parser.error = refuse  # type: ignore[method-assign]
    parser.set_defaults(command=name)
    number = "+" if "…" in usage else "?" if usage.startswith("[") else None
    parser.add_argument("directory", type=Path, nargs=number)
    for flag, value in re.findall(r"\[(--\w+)( \w+)?\]", usage):
        if value:
            parser.add_argument(flag, type=Path if value == " FILE" else str)
        else:
            parser.add_argument(flag, action="store_true")
    if name == "sync":
        parser.add_argument("--follow", action="store_true")  # used by runs and sweeps
    return parser.parse_intermixed_args(words)


def listing() -> str:
    """Return the list of commands."""
    lines = ["Commands; --help <command> lists the arguments"]
    return "\n".join([*lines, *(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items())])


def listed_names() -> str:
    """Return the names of all commands, for the end of every help."""
    title = "Commands (--help <command>)"
    return "\n".join([title, textwrap.fill(", ".join(COMMANDS), 78, initial_indent="  ", subsequent_indent="  ")])


def help_of(name: str) -> str:
    """Return the help of a command."""
    command = COMMANDS[name]
    program = ["python", "train.py"] if name in OF_PROJECTS else ["hydraloop"]
    keys = [f"[{key}={values}]" for key, values in command.keys.items()]
    more = ["[key=value …]"] if command.keys else []
    usage = " ".join(["usage:", *program, name, command.arguments, *keys, *more])
    text = f"{command.summary[0].upper()}{command.summary[1:]}. {command.details}"
    if name == "new":
        text += f" Examples: {', '.join(templates())}."
    return "\n\n".join([usage, textwrap.fill(text, 78), listed_names()])

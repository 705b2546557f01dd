"""The command lines of `python -m hydraloop <command>`: their one parser, and the list of commands for `--help`."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from hydraloop.cli.arguments import refuse
from hydraloop.errors import UserError


@dataclass(frozen=True)
class Command:
    """A command, as `--help` shows it."""

    arguments: str
    """As typed, in the list of commands."""
    summary: str
    details: str = ""
    """More sentences for the command's own help."""
    keys: dict[str, str] = field(default_factory=dict)
    """Arguments that are typed as `key=value`, with their possible values."""


_SPLIT = {"split": "test|val"}
_CHECKPOINT = {"checkpoint": "best|last|FILE"}
COMMANDS = {
    "new": Command(
        "<folder>",
        "write a small project",
        "Without --from, it is a classification with a model, data, a hook and a test.",
    ),
    "resume": Command("<run>", "continue a run with its saved config"),
    "evaluate": Command("<run>", "print the metrics of a finished run as JSON", keys=_SPLIT | _CHECKPOINT),
    "predict": Command(
        "<run>",
        "write the predictions of a finished run, in the order of the data",
        keys={**_SPLIT, **_CHECKPOINT, "output": "FILE.jsonl|FILE.npz"},
    ),
    "export": Command(
        "<run>", "write the model of a finished run for use without hydraloop", keys={**_CHECKPOINT, "output": "FILE"}
    ),
    "runs": Command(
        "[folder]",
        "list all runs and jobs of sweeps, the newest first",
        "Without a folder, it looks in outputs/ and multirun/.",
    ),
    "status": Command("<folder>", "print how a sweep or a run is doing"),
    "attach": Command("<folder>", "show a sweep or a run until it ends", "Ctrl-C leaves it running."),
    "results": Command("<sweep>", "print the results of a sweep, and write results.csv and results.json"),
    "report": Command(
        "<folder>",
        "write a page of HTML about a run or a sweep",
        "With several runs, the page compares them. It needs no network.",
    ),
    "stop": Command("<folder>", "let a sweep or a run save and end, and end all of its processes"),
    "sync": Command("<folder>", "send trackers the records and files that they do not have"),
    "check": Command(
        "[key=value …]",
        "test the data, the model and the task of the project in this folder",
        "It runs train.py until that calls hydraloop.main(), and trains some iterations in a temporary folder. "
        "Exit code: 0 no problem, 1 a problem, 2 a mistake.",
    ),
}
ON_RANKS = ("evaluate", "predict", "export")
"""Commands that load a run, on as many processes as the run had."""
PLACE = ("config-path", "config-name", "config-dir")
"""Flags of Hydra that say where the config is."""
_PROGRAM = "python -m hydraloop"
_COLUMN = 39
"""Where the summaries begin in the list."""


def listing() -> str:
    """Return the list of commands."""
    lines = ["Commands for runs and sweeps; <command> --help lists the arguments"]
    for name, command in COMMANDS.items():
        typed = f"  {_PROGRAM} {name} {command.arguments}"
        if len(typed) >= _COLUMN:
            lines.append(typed)
            typed = ""
        lines.append(f"{typed:{_COLUMN}}{command.summary}")
    return "\n".join(lines)


def listed_names() -> str:
    """Return the names of all commands, for the end of every help."""
    title = f"Commands for finished runs and sweeps ({_PROGRAM} <command> --help)"
    return "\n".join([title, textwrap.fill(", ".join(COMMANDS), 78, initial_indent="  ", subsequent_indent="  ")])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse(message)


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command. Its name is the first one.

    Raises:
        SystemExit: after a mistake, with argparse's message, or after `--help`.
    """
    return of(argv[0]).parse_intermixed_args(argv[1:])


def of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    command = COMMANDS[name]
    description = textwrap.fill(f"{command.summary[0].upper()}{command.summary[1:]}. {command.details}", 78)
    parser = _Parser(
        prog=f"{_PROGRAM} {name}",
        description=description,
        epilog=listed_names(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=name)
    if name in ("runs", "status", "results"):
        parser.add_argument("--json", action="store_true", help="print one JSON document, also for an error")
    if name in ON_RANKS:
        _add_run(parser, name)
    elif name == "report":
        _add_report(parser)
    elif name == "sync":
        _add_trackers(parser)
    elif name == "new":
        _add_new(parser)
    elif name == "runs":
        _add_runs(parser)
    elif name == "check":
        _add_project(parser)
    else:
        _add_directory(parser, name)
    return parser


def _add_run(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("run", type=Path, help="the run directory, outputs/<date>/<run>")
    own = ", ".join(f"{key}={values}" for key, values in COMMANDS[name].keys.items())
    what = f"{own}; or changes of the run's config, such as data.test.root=/data"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=what, default=[])
    what = "packages whose classes the config may name, such as timm,peft; a dot for the files in the working directory"
    parser.add_argument("--trusted", action="append", default=[], metavar="PACKAGES", help=what)
    if name == "export":
        what = "weights, or the graph of the model (torch.export, ONNX)"
        parser.add_argument("--format", required=True, choices=("safetensors", "pt2", "onnx"), help=what)


def _add_directory(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("directory", type=Path, help="multirun/<date>/<sweep>, or outputs/<date>/<run>")
    if name == "stop":
        parser.add_argument("--kill", action="store_true", help="kill at once; so does a second stop")


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", nargs="?", type=Path, metavar="FOLDER", help="a folder to look in")
    what = "the best first by a metric: accuracy, loss, test.accuracy"
    parser.add_argument("--sort", metavar="METRIC", help=what)


def _add_report(parser: argparse.ArgumentParser) -> None:
    what = "multirun/<date>/<sweep>, or outputs/<date>/<run>; several runs are compared"
    parser.add_argument("directory", nargs="+", type=Path, metavar="FOLDER", help=what)
    parser.add_argument("--open", action="store_true", help="show the page in a browser")
    what = "the page (report.html in the folder; with several runs, in the working directory)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=what)


def _add_new(parser: argparse.ArgumentParser) -> None:
    from hydraloop.commands.new import STARTER, templates

    parser.add_argument("directory", type=Path, help="a new folder", metavar="FOLDER")
    what = "an example to start from: "
    names = templates()
    parser.add_argument(
        "--from", dest="template", choices=names, default=STARTER, help=what + ", ".join(names), metavar="EXAMPLE"
    )


def _add_trackers(parser: argparse.ArgumentParser) -> None:
    what = "a run, a sweep, or a folder of them (outputs/); or an option that is used instead of the run's, such as "
    parser.add_argument("directory", nargs="+", help=f"{what}hooks.mlflow.tracking_uri=http://localhost:5000")
    what = "send everything, because the service has been replaced or has moved; with an option of a tracker, to that "
    parser.add_argument("--again", action="store_true", help=f"{what}one only")
    what = "a package or file with a custom tracker"
    parser.add_argument("--trusted", action="append", default=[], metavar="PACKAGE", help=what)
    what = "used by runs and sweeps: send what is new until the process ends that has started this one"
    parser.add_argument("--follow", action="store_true", help=what)


def _add_project(parser: argparse.ArgumentParser) -> None:
    what = "as after `python train.py`"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=what, default=[])
    for name in PLACE:
        parser.add_argument(f"--{name}", help=what)


def split(args: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Return the command's own `key=value` arguments, and the changes of the run's config.

    Raises:
        UserError: an argument of the command has no value.
    """
    keys = COMMANDS[args.command].keys
    own: dict[str, str] = {}
    overrides = []
    for text in args.overrides:
        key, _, value = text.partition("=")
        if key not in keys:
            overrides.append(text)
        elif not value:
            remedy = f"Write {key}={keys[key]}, or leave it out."
            raise UserError("it has no value", key=key, remedy=remedy)
        else:
            own[key] = value
    return own, overrides

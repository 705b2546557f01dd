"""`python -m hydraloop evaluate|predict|export|replay <run> …`: the commands for a run, which they do not change.

`evaluate`, `predict` and `replay` start as many processes as the run had, so that results have the same bits.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hydraloop.cli.console import PrintableFormatter
from hydraloop.cli.error_reports import Reports
from hydraloop.errors import UserError, printable
from hydraloop.launch import elastic, torchrun
from hydraloop.launch.checks import check_debugger
from hydraloop.launch.termination import terminable
from hydraloop.launch.unloading import leave_before_unloading
from hydraloop.run.uncollected import uncollected
from hydraloop.safety import working_directory
from hydraloop.safety.secrets import remember_overrides

if TYPE_CHECKING:
    from hydraloop.engine.distributed.comm import Distributed

COMMANDS = {
    "evaluate": "Print the metrics of a finished run as JSON.",
    "predict": "Write the predictions of a finished run, in the order of the data.",
    "export": "Write the model of a finished run for use without hydraloop.",
    "replay": "Rebuild a run at an iteration. Print its samples, loss and gradient norm, and compare with the records.",
}
_ARGUMENTS = {
    "evaluate": {"split": "test|val", "checkpoint": "best|last|FILE"},
    "predict": {"split": "test|val", "checkpoint": "best|last|FILE", "output": "FILE.jsonl|FILE.npz"},
    "export": {"checkpoint": "best|last|FILE", "output": "FILE"},
    "replay": {"iteration": "N"},
}


def main(argv: Sequence[str]) -> int:
    """Run a command. Returns the exit code: 0, 1 after an error message, 128 + n after signal n; argparse: 2."""
    finished = leave_before_unloading()
    code = _main(argv)
    if torchrun.is_several():
        finished(code)
    return code


def _main(argv: Sequence[str]) -> int:
    args = _parser(argv[0]).parse_intermixed_args(argv[1:])
    remember_overrides(args.overrides)
    _log_warnings()
    working_directory.trust(argv, args.run, args.trusted)
    if torchrun.is_several():
        torchrun.keep_quiet()
    ranks: list[Distributed] = []
    try:
        with terminable():
            return _run(argv, args, ranks)
    except (Exception, KeyboardInterrupt) as error:
        if _reports(error, *ranks):
            Reports(with_traceback=os.environ.get("HYDRA_FULL_ERROR") == "1").show(error)
        return 128 + getattr(error, "number", signal.SIGINT) if isinstance(error, KeyboardInterrupt) else 1


def _run(argv: Sequence[str], args: argparse.Namespace, ranks: list[Distributed]) -> int:
    """Run a command, and add this process's connection to the other ranks to `ranks`."""
    with uncollected():
        from hydraloop.cli.after_training import Command, Request
        from hydraloop.engine.distributed.process_group import connect
        from hydraloop.replay import Replay

    name = argv[0]
    own: dict[str, str] = {}
    overrides = []
    for text in args.overrides:
        key, _, value = text.partition("=")
        if key in _ARGUMENTS[name]:
            if not value:
                remedy = f"Write {key}={_ARGUMENTS[name][key]}, or leave it out."
                raise UserError("it has no value", key=key, remedy=remedy)
            own[key] = value
        else:
            overrides.append(text)
    command: Command | Replay
    if name == "replay":
        command = Replay(args.run, own.get("iteration", ""), overrides, debug=args.pdb)
        if args.pdb:
            check_debugger(command.cfg, is_sweep=False)
    else:
        output = f"model.{args.format}" if name == "export" else "predictions.jsonl"
        command = Command(Request(name, args.run, args.format, overrides=overrides, **{"output": output, **own}))
    if command.processes > 1 and not torchrun.is_several():
        return elastic.run_module(["hydraloop", *argv], command.processes)
    distributed = connect(command.cfg.distributed, command.cfg.engine.device)
    ranks.append(distributed)
    ranks_differ = command.trained_by not in (None, distributed.world_size)
    note = f" (trained by {command.trained_by} ranks: the last digits can differ)" if ranks_differ else ""
    told = printable(f"{command.source}{note}")
    if distributed.is_main and name == "replay":
        print(told, file=sys.stderr, flush=True)
    text = command.run(distributed)
    if distributed.is_main:
        if name != "replay":
            print(told, file=sys.stderr)  # standard output has only the result
        print(text)
    distributed.close()
    return int(command.differs)


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m hydraloop {name}", description=COMMANDS[name])
    parser.add_argument("run", type=Path, help="the run directory, outputs/<date>/<run>")
    own = ", ".join(f"{key}={values}" for key, values in _ARGUMENTS[name].items())
    what = f"{own}; or changes of the run's config, such as data.test.root=/data"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=what, default=[])
    what = "packages whose classes the config may name, such as timm,peft; a dot for the files in the working directory"
    parser.add_argument("--trusted", action="append", default=[], metavar="PACKAGES", help=what)
    what = "weights, or the graph of the model (torch.export, ONNX)"
    formats = ("safetensors", "pt2", "onnx")
    if name == "export":
        parser.add_argument("--format", required=True, choices=formats, help=what)
    else:
        parser.set_defaults(format="")
    if name == "replay":
        parser.add_argument("--pdb", action="store_true", help="open Python's debugger before the iteration")
    return parser


def _log_warnings() -> None:
    """Write warnings to standard error, on rank 0. Standard output has only the result."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("warning: %(message)s"))
    logging.basicConfig(level=logging.WARNING if torchrun.rank() == 0 else logging.CRITICAL, handlers=[handler])


def _reports(error: BaseException, distributed: Distributed | None = None) -> bool:
    """Return whether this rank prints the error: the one that failed first."""
    if distributed is None:  # all ranks have the same mistake
        return torchrun.rank() == 0 or not isinstance(error, UserError | KeyboardInterrupt)
    distributed.abandon(error)
    failed = distributed.first_failure()
    return failed is None or failed[0] == distributed.rank

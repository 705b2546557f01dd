"""`python -m hydraloop.tracking.parent begin|end <sweep directory> <hook name>`: create or close a sweep's parent run.

`sweeps.py` starts this separate process, so that the controller imports no tracker. The options come through stdin. On
an error, the last line of the output is the error, and the exit code is 1.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from hydraloop.run import atomic
from hydraloop.safety.secrets import mask_text, remember
from hydraloop.tracking.follower.follower import described
from hydraloop.tracking.follower.locks import FOLDER
from hydraloop.tracking.follower.masked_logging import log_to_stderr

_OPTIONS = "{}.parent.json"


def main(what: str, folder: Path, hook: str) -> int:
    """Create the parent run, or close it. Returns the exit code."""
    log_to_stderr()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries may print to stdout
    given = json.load(sys.stdin)
    remember(given["options"])
    try:
        kept = {**given, "options": given["masked"]}
        del kept["masked"]
        atomic.write_text(folder / FOLDER / _OPTIONS.format(hook), json.dumps(kept) + "\n")
        if what == "begin":
            _begin(given)
        else:
            finish(folder, given)
    except Exception as error:
        logging.exception("the parent run")
        print(mask_text(described(error)), file=out, flush=True)
        return 1
    return 0


def _begin(given: dict[str, Any]) -> None:
    from hydraloop.tracking.mlflow import address

    address.prepare_database(address.address_of(given["options"], {}))


def finish(folder: Path, given: dict[str, Any]) -> None:
    """Update the parent runs of a sweep. May be repeated.

    Args:
        folder: directory of the sweep.
        given: not used.
    """
    from hydraloop.tracking.mlflow.sweep import update_parents

    update_parents(folder)


def parents(folder: Path) -> list[Path]:
    """Return the files, for `read`, of the hooks that have a parent run for the sweep in a directory."""
    return sorted((folder / FOLDER).glob(_OPTIONS.format("*")))


def read(path: Path) -> dict[str, Any]:
    """Return what `finish` is given, with secrets masked."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))

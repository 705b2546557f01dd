"""`python -m hydraloop.tracking.parent begin|end <sweep directory> <hook name>`: the parent run of a sweep's runs.

A process of its own, as `sweeps.py` starts it: the controller imports no tracker. Options come through the input. What
goes wrong is the last line of the output, with exit code 1.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from hydraloop.tracking import description
from hydraloop.tracking.follower import described
from hydraloop.tracking.locks import FOLDER

_OPTIONS = "{}.parent.json"


def main(what: str, folder: Path, hook: str) -> int:
    """Make the parent run, or tell it how the jobs ended. Returns the exit code."""
    logging.basicConfig(level=logging.INFO)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print
    given = json.load(sys.stdin)
    try:
        if what == "begin":
            _begin(folder, hook, given)
        else:
            finish(folder, given["options"])
    except Exception as error:
        logging.exception("the parent run")
        print(described(error), file=out, flush=True)
        return 1
    return 0


def _begin(folder: Path, hook: str, given: dict[str, Any]) -> None:
    from hydraloop.tracking.mlflow_sweep import ensure_parent

    kept = {"kind": given["kind"], "options": given["masked"], "experiment": given["experiment"]}
    (folder / FOLDER / _OPTIONS.format(hook)).write_text(json.dumps(kept) + "\n", encoding="utf-8")
    sweep = description.read_sweep(folder)
    assert sweep is not None, "the controller describes the sweep first"
    ensure_parent(given["options"], sweep, given["experiment"])


def finish(folder: Path, options: dict[str, Any]) -> None:
    """Tell the parent run how the jobs ended; may be repeated."""
    from hydraloop.tracking.mlflow_sweep import finish_parent

    finish_parent(options, folder)


def parents(folder: Path) -> list[dict[str, Any]]:
    """The options, secrets masked, of the trackers with a parent run for the sweep in a directory."""
    found = sorted((folder / FOLDER).glob(_OPTIONS.format("*")))
    return [json.loads(path.read_text(encoding="utf-8"))["options"] for path in found]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))

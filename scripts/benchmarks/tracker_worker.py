"""A training of `tracker_overhead.py`: `python tracker_worker.py TimedRecords|ByHand INTERVAL AT_ONCE [override …]`.

Runs in a project folder and writes what its hook has measured to `measured.json` there.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import cast

from tracker_hooks import TimedRecords

import hydraloop

ROOT = Path(__file__).resolve().parents[2]
RUN = "run"
"""The run directory, in the working directory."""
MEASURED = "measured.json"
USUAL = (
    "engine.val_interval=null",
    "engine.test=false",
    "data.loader.batch_size=64",
    "default_hooks.logger.interval=null",
    "default_hooks.checkpoint.interval=null",
)


def main() -> None:
    """Train, and write what was measured."""
    hook, interval, at_once, *overrides = sys.argv[1:]
    logging.disable(logging.INFO)  # no lines in the terminal
    added = [
        f"+hooks.timed._target_=tracker_hooks.{hook}",
        f"+hooks.timed.interval={interval}",
        f"+hooks.timed.at_once={at_once}",
    ]
    cfg = hydraloop.compose([*USUAL, *overrides, *added], folder=ROOT, trusted=["tracker_hooks"])
    Path(RUN).mkdir()
    engine = hydraloop.build(cfg, run_dir=Path(RUN))
    engine.train()
    timed = cast(TimedRecords, engine.hooks["timed"])
    measured = {"took": timed.took, "took_in_a_row": timed.took_in_a_row, "ended": timed.ended}
    Path(MEASURED).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main()

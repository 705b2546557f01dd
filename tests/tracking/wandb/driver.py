"""A follower's process for tests: `python -m tests.tracking.wandb.driver <run_dir> <options as JSON> <action> …`.

W&B's library starts a process, threads and exit handlers, which the process of the tests should not have. Prints one
line of JSON: states, troubles, the cursor, and after the action `read` the contents of each offline file.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from hydraloop.files.metrics_log import FILENAME, Position, Reader, count
from hydraloop.files.metrics_writer import RecordLog
from hydraloop.tracking import run_description
from hydraloop.tracking.cursor import Cursor
from hydraloop.tracking.follower import Follower
from hydraloop.tracking.tracker import WANDB, Finish
from hydraloop.tracking.wandb import WandbTracker
from tests.processes import children
from tests.tracking.runs import log_records, track
from tests.tracking.wandb.file import records

OPTIONS: dict[str, Any] = {
    "init": {"mode": "offline"}, "log_code": False, "checkpoints": None, "flush_timeout": 2.0, "_measures": False,
}  # fmt: skip
_ENDINGS = {
    "finish": Finish("finished"), "fail": Finish("failed", "ValueError: no"), "killed": Finish("killed"),
}  # fmt: skip


class Driver:
    """The follower of a run in one process."""

    def __init__(self, run_dir: Path, options: dict[str, Any]) -> None:
        run = run_description.read(run_dir)
        assert run is not None
        self.run_dir = run_dir
        given = {**OPTIONS, **options}
        track(run_dir, "wandb", WANDB, given)
        self.cursor = Cursor.load(run_dir, "wandb") or Cursor(WANDB)
        self.tracker = WandbTracker(given, run, self.cursor.memory)
        self.troubles: list[str | None] = []
        self.warnings = _Warnings()
        logging.getLogger("hydraloop").addHandler(self.warnings)
        self.states: list[str] = []
        self.found: dict[str, Any] = {}
        self.follower = Follower(self.tracker, self.cursor, run_dir, "wandb", self.troubles.append)

    def do(self, action: str) -> None:
        """Do log=N, odd=JSON, upload, drain, step, kill, notice, fill, free, die, send_and_die, close, read or end."""
        name, _, argument = action.partition("=")
        if name == "log":
            log_records(self.run_dir, int(argument), first=count(self.run_dir / FILENAME))
        elif name == "odd":
            log = RecordLog(self.run_dir / FILENAME)
            log.append(json.loads(argument))
            log.close()
        elif name == "upload":  # `wandb sync` of the directory
            Path(f"{next((self.run_dir / 'wandb').glob('offline-run-*/*.wandb'))}.synced").touch()
        elif name == "drain":
            self._until("caught up", None)
        elif name == "step":
            self.states.append(self.follower.step(None))
        elif name in _ENDINGS:
            self._until("done", _ENDINGS[name])
        elif name == "kill":
            killed = cores()
            for core in killed:
                core.kill()
            psutil.wait_procs(killed, timeout=10)
        elif name == "notice":  # W&B's library may take records for a while after its process was killed
            while self.states[-1] != "in trouble":
                self.do("log=1")
                self.do("step")
        elif name == "fill":  # until W&B's process has failed to write
            with suppress(OSError), (self.run_dir.parent / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
            self.states.append(self.follower.step(None))
            time.sleep(3.0)
        elif name == "free":
            (self.run_dir.parent / "filler").unlink()
        elif name == "send_and_die":
            reader = Reader(self.run_dir / FILENAME, Position())
            reader.position = reader.find(self.cursor.index)
            self.tracker.send(reader.read(1 << 30)[0])
            os._exit(9)
        elif name == "die":
            os._exit(9)
        elif name == "close":
            self.tracker.close()
            self.states.append(f"{len(cores())} cores")
        else:
            self.found = {file.parent.name: _contents(file) for file in _files(self.run_dir)}

    def _until(self, state: str, finish: Finish | None) -> None:
        for _ in range(500):
            self.states.append(self.follower.step(finish))
            if self.states[-1] in (state, "given up"):
                return
            if self.states[-1] == "in trouble":
                time.sleep(self.follower.wait(ending=finish is not None))
        raise AssertionError(f"{state} is not reached: {self.states}, {self.troubles}")


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def cores() -> list[psutil.Process]:
    """W&B's own processes that this process has started and that run."""
    return [one for one, command in children().items() if Path(command[0]).name == "wandb-core"]


def _files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"))


def _nested(items: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in items:
        *keys, last = item.nested_key or [item.key]
        inner = found
        for key in keys:
            inner = inner.setdefault(key, {})
        inner[last] = json.loads(item.value_json)
    return found


def _contents(file: Path) -> dict[str, Any]:
    from wandb.proto import wandb_internal_pb2 as protocol

    parse: Any = getattr(protocol, "Record").FromString  # noqa: B009
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"rows": rows, "config": {}, "summary": {}, "exit": None, "files": [], "metrics": {}}
    found |= {"artifacts": [], "environment": {}}
    for record in (parse(one) for one in records(file)):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            rows.append({"step": record.history.step.num, **_nested(record.history.item)})
        elif kind == "run":
            found.update(id=record.run.run_id, group=record.run.run_group, name=record.run.display_name)
            found.update(sweep=record.run.sweep_id, commit=record.run.git.commit)
            found.update(
                project=record.run.project,
                notes=record.run.notes,
                job_type=record.run.job_type,
                tags=list(record.run.tags),
            )
            found["config"] = {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "summary":
            found["summary"].update(_nested(record.summary.update))
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
        elif kind == "files":
            found["files"] += [item.path for item in record.files.files]
        elif kind == "metric":
            found["metrics"][record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "artifact":
            one = record.artifact
            about = {"name": one.name, "type": one.type, "aliases": list(one.aliases), "input": one.use_after_commit}
            found["artifacts"].append({**about, "metadata": json.loads(one.metadata or "{}")})
        elif kind == "environment" and record.environment.program:
            about = record.environment
            found["environment"] = {"program": about.program, "args": list(about.args), "host": about.host}
        elif kind in ("stats", "output", "output_raw"):
            found[kind] = found.get(kind, 0) + 1
    return found


def main() -> None:
    """Perform the actions on the command line."""
    driver = Driver(Path(sys.argv[1]), json.loads(sys.argv[2]))
    for action in sys.argv[3:]:
        driver.do(action)
    print(
        json.dumps(
            {
                "states": driver.states,
                "troubles": driver.troubles,
                "warnings": driver.warnings.texts,
                "where": driver.tracker.where,
                "sent": driver.cursor.sent,
                "finished": driver.cursor.complete,
                "refused": driver.cursor.refused,
                "files": driver.found,
            }
        )
    )


if __name__ == "__main__":
    main()

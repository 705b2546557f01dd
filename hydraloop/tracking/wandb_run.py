"""A live W&B run: its rows and artifacts. Contains the calls of W&B's library."""

from __future__ import annotations

import html
import json
import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import wandb
import yaml

from hydraloop.files.atomic import file_name
from hydraloop.files.checkpoint_files import is_complete
from hydraloop.files.code_patch import FILENAME as PATCH_FILE
from hydraloop.files.metrics_log import LoggedObject, Record
from hydraloop.files.result import FILENAME as RESULT_FILE
from hydraloop.files.secrets import mask_text, masked
from hydraloop.tracking.run_description import checkpoints, result_of
from hydraloop.tracking.tracker import Finish, RefusedError, Run, UnusableError, own, valid_utf8

log = logging.getLogger(__name__)

Mode = Literal["online", "offline"]

FOLDER = "wandb"
"""Folder of W&B's files in the run directory."""
_NOT_IN_ARTIFACTS = r"[^A-Za-z0-9_.-]"
_LONGEST = 128
"""Most characters of the name of a project, group, run or artifact at W&B."""
_SYNC_TIMEOUT = 60.0
"""Seconds to wait for the service to open a run in `sync`."""
_TIME_TO_UPLOAD = 0.8
"""Part of `flush_timeout` for uploading; the rest is for reporting what was not uploaded."""
_FLUSH_INTERVAL = 2.0
"""Seconds after which W&B writes to its file. Its default is 15."""


class LiveRun:
    """A W&B run to which rows can be logged.

    Args:
        options: the hook's options.

    Raises:
        UnusableError: W&B does not accept a name or another option.
    """

    def __init__(self, options: dict[str, Any], run: Run, run_id: str, mode: Mode) -> None:
        self._options, self._run, self._id, self._warned = options, run, run_id, False
        given = dict(masked(options["init"]))
        settings = wandb.Settings(**{**_settings(options, run), **given.pop("settings", {})})
        fixed = {"id": run_id, "dir": str(run.run_dir), "mode": mode, "resume": "allow", "reinit": "create_new"}
        try:
            self._wandb = wandb.init(**{**names(run), **given, **fixed}, config=config_of(run), settings=settings)
        except wandb.errors.UsageError as error:
            raise UnusableError(f"W&B refuses an option of hooks.wandb: {error}") from error
        self._wandb.define_metric("iteration", hidden=True)
        self._wandb.define_metric("*", step_metric="iteration")
        self.file = Path(self._wandb.settings.sync_file)
        self.url = self._wandb.url if mode == "online" else None
        self.starts_at = int(self._wandb.starting_step)
        """The step after the last one that the service had when the run was opened."""
        if options["log_code"]:
            self._save_code()

    def log(self, records: Sequence[Record]) -> None:
        """Log each record as a row."""
        for record in records:
            self._wandb.log(self._row(record), step=record.index, commit=True)

    def _row(self, record: Record) -> dict[str, Any]:
        texts = {f"{record.mode}/{name}": text for name, text in masked(record.texts).items()}
        row = {**record.metrics, **texts, "iteration": record.iteration, "epoch": record.epoch}
        if record.timestamp:
            row["_timestamp"] = record.timestamp
        for one in record.objects:
            try:
                row.update(self._media(one))
            except Exception as error:  # a damaged file can raise any error
                level = logging.INFO if self._warned else logging.WARNING
                log.log(level, "%s is not sent to W&B, as others like it will not be: %s", one.path, error)
                self._warned = True
        return row

    def _media(self, one: LoggedObject) -> dict[str, Any]:
        """Return an object as values of a row. An artifact is logged beside the row."""
        path = own(self._run.run_dir, self._run.run_dir / one.path)
        if one.kind == "image":
            return {one.name: wandb.Image(str(path))}
        if one.kind == "artifact":
            self._output(one.name, "file", path)
            return {}
        text = path.read_text(encoding="utf-8")
        if one.kind == "text":
            return {one.name: wandb.Html(f"<pre>{html.escape(text)}</pre>", data_is_not_path=True)}
        found = json.loads(text)
        if one.kind == "table":
            return {one.name: wandb.Table(columns=found["columns"], data=found["rows"], allow_mixed_types=True)}
        return {name: _histogram(counted) for name, counted in found.items() if counted["bucket"]}

    def log_checkpoints(self, sent: list[str], best: str | None = None, *, ended: bool) -> None:
        """Log selected checkpoints as artifacts, unless they are in `sent`, and add them to it.

        W&B's library moves the alias `latest` to each artifact that it logs. So the newest file comes last, and is
        logged again after the best one gets its alias. W&B does not store an equal file twice.
        """
        named = None if best is None else Path(best).name
        foreign = bool(self._options.get("_sync"))
        found = checkpoints(self._run, self._options["checkpoints"], best, ended=ended, foreign=foreign)
        if all(path.name in sent and path.name != named for path in found):
            return
        found = [path for path in sorted(found, key=_written_at) if is_complete(path)]
        due = [path for path in found if path.name == named]
        due += [path for path in found if path.name not in (*sent, named)]
        if due and due[-1] != found[-1]:
            due.append(found[-1])
        for path in due:
            self._output("checkpoint", "model", path, path.stem, *(["best"] if path.name == named else []))
            sent.append(path.name)

    def finish(self, finish: Finish, sent: list[str]) -> None:
        """Write the summary, `result.json` and the checkpoints, and close the run. See `log_checkpoints` for `sent`."""
        result = result_of(self._run.run_dir, self._run.attempt)
        if result:
            self._save(RESULT_FILE, mask_text(json.dumps(result, indent=1)).encode())
        summary: dict[str, Any] = {"status": finish.status}
        if finish.error is not None:
            summary["error"] = valid_utf8(finish.error)
        best = result.get("best") or {}
        if best:
            summary["best"] = {name: best[name] for name in ("metric", "value", "iteration")}
            summary[f"val/{best['metric']}"] = best["value"]
        self._wandb.summary.update(summary)
        self.log_checkpoints(sent, best.get("checkpoint"), ended=True)
        self._wandb.finish(exit_code=finish.exit_code)

    def _save_code(self) -> None:
        for attempt in self._run.attempts:
            if attempt.patch is not None:
                with suppress(OSError, RefusedError):
                    content = own(self._run.run_dir, self._run.run_dir / attempt.patch).read_bytes()
                    self._save(f"resume_{attempt.number}/{PATCH_FILE}" if attempt.number else PATCH_FILE, content)

    def _save(self, name: str, content: bytes) -> None:
        copy = Path(self._wandb.dir, name)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(content)
        self._wandb.save(str(copy), base_path=self._wandb.dir, policy="now")

    def _output(self, name: str, kind: str, path: Path, *aliases: str) -> None:
        """Log a file as an output of the run."""
        usable = file_name(f"{name}-{self._id}", _NOT_IN_ARTIFACTS, longest=_LONGEST)
        artifact = wandb.Artifact(usable, kind, metadata={"file": path.name})
        artifact.add_file(str(path))
        self._wandb.log_artifact(artifact, aliases=list(aliases))


def _written_at(path: Path) -> float:
    with suppress(OSError):  # a checkpoint may be deleted at any time
        return path.stat().st_mtime
    return 0.0


def _histogram(counted: Mapping[str, Any]) -> Any:
    edges: Any = [counted["min"], *counted["bucket_limit"]]
    return wandb.Histogram(np_histogram=(counted["bucket"], edges))


def names(run: Run) -> dict[str, str | None]:
    """Return project, group and name as arguments of `wandb.init`: those of its variables, else the run's."""
    group = "" if run.sweep is None else run.sweep.name
    chosen = {
        "project": os.environ.get("WANDB_PROJECT") or run.experiment,
        "group": os.environ.get("WANDB_RUN_GROUP") or group,
        "name": os.environ.get("WANDB_NAME") or run.name,
    }
    return {key: name[:_LONGEST] or None for key, name in chosen.items()}


def config_of(run: Run) -> dict[str, Any]:
    """Return the first attempt's config. What later attempts changed is named `resume_<n>/optimizer/lr`.

    `hydraloop` has the uid, the command, the commit, … NaN and infinity become text.
    """
    first, *resumed = run.attempts
    config: dict[str, Any] = yaml.safe_load(first.config) or {}
    current = first.params
    for attempt in resumed:
        for name, value in attempt.params.items():
            if name not in current or current[name] != value:
                config[f"resume_{attempt.number}/{name.replace('.', '/')}"] = value  # W&B accepts no dots in names
        current = attempt.params
    config["hydraloop"] = {"uid": run.uid, **first.tags}
    found: dict[str, Any] = json.loads(json.dumps(config, default=str), parse_constant=str)
    return found


def _settings(options: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Return W&B's settings: command, host and commit of the run instead of this process's.

    W&B asks nothing, and does not collect terminal output, code or git state by itself.
    """
    is_sync = bool(options.get("_sync"))
    seconds = _SYNC_TIMEOUT if is_sync else max(1.0, options["flush_timeout"])
    tags = run.attempt.tags
    words = shlex.split(tags.get("command", ""))  # `python train.py a=1`
    sys.argv[1:] = words[2:]  # W&B has no setting for the arguments
    return {
        "program": " ".join(words[1:2]) or None,
        "host": tags.get("host"),
        "git_commit": tags.get("git_commit"),
        "console": "off",
        "disable_git": True,
        "save_code": False,
        "init_timeout": seconds,
        "finish_timeout": 0.0 if is_sync else _TIME_TO_UPLOAD * seconds,
        "finish_timeout_raises": True,
        "x_transaction_log_flush_interval": _FLUSH_INTERVAL,
        "x_disable_stats": not options.get("_measures", True),
        "x_stats_pid": run.attempt.pid,
        "stop_fn": lambda: None,  # the stop button of W&B's page must not stop the sender
    }

"""A live W&B run: its rows and artifacts. Contains the calls of W&B's library."""

from __future__ import annotations

import html
import json
import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

from hydraloop.run_files.atomic import file_name
from hydraloop.run_files.checkpoint_files import is_complete
from hydraloop.run_files.code_patch import FILENAME as PATCH_FILE
from hydraloop.run_files.record_log import FILENAME, LoggedObject, Record, read_all
from hydraloop.run_files.result import FILENAME as RESULT_FILE
from hydraloop.safety.secrets import mask_text, masked
from hydraloop.tracking.own_files import own, own_folder
from hydraloop.tracking.run_description import checkpoints, result_of
from hydraloop.tracking.tracker import Finish, RefusedError, Run, UnusableError, valid_utf8

log = logging.getLogger(__name__)

Mode = Literal["online", "offline"]

FOLDER = "wandb"
"""Folder of W&B's files in the run directory."""
_NOT_IN_ARTIFACTS = r"[^A-Za-z0-9_.-]"
_LONGEST = 128
"""Most characters of the name of a project, group, run or artifact at W&B."""
_NOT_IN_PROJECTS = str.maketrans(dict.fromkeys("/\\#?%:", "-"))


class LiveRun:
    """A W&B run to which rows can be logged.

    Args:
        options: the hook's options.
        how: further arguments for `wandb.init`.

    Raises:
        UnusableError: W&B does not accept a name.
    """

    def __init__(self, options: dict[str, Any], run: Run, run_id: str, mode: Mode, settings: Any, **how: Any) -> None:
        import wandb

        self._options, self._run, self._id = options, run, run_id
        self._defined, self._warned = {"iteration"}, False
        folder = run.run_dir / FOLDER
        own_folder(run.run_dir, folder)
        before = set(folder.glob("*run-*"))
        try:
            self._wandb = wandb.init(
                **identity(options, run),
                dir=str(run.run_dir),
                mode=mode,
                id=None if "resume_from" in how else run_id,
                reinit="create_new",
                settings=settings,
                **how,
            )
        except BaseException as error:
            for path in set(folder.glob("*run-*")) - before:  # repeated tries would leave many folders
                shutil.rmtree(path, ignore_errors=True)
            if isinstance(error, wandb.errors.UsageError):
                raise UnusableError(f"W&B refuses an option of hooks.wandb: {error}") from error
            raise
        self._wandb.define_metric("iteration", hidden=True)
        self.file = Path(self._wandb.settings.sync_file)
        self.url = self._wandb.url if mode == "online" else None
        self.starts_at = int(self._wandb.starting_step)  # its `step` is 0 for a resumed run
        """The step after the last one that the service had when the run was opened."""
        if options.get("log_code"):
            self._save_code()

    def log(self, records: Sequence[Record]) -> None:
        """Log each record as a row, and the last values as the summary."""
        from wandb.sdk.data_types.utils import history_dict_to_json  # as `wandb.log` does: writes the files of objects

        interface: Any = self._wandb._interface  # `wandb.log` replaces `_runtime` by the time since the run was opened
        last: dict[str, Any] = {}
        for record in records:
            row = history_dict_to_json(self._wandb, self._row(record), step=record.index)
            for name in row.keys() - self._defined:
                if not name.startswith("_") and "*" not in name:  # W&B takes a star for a pattern
                    self._wandb.define_metric(name, step_metric="iteration")
            self._defined |= row.keys()
            interface.publish_history(self._wandb, dict(row), step=record.index)
            last.update(row)
        if "_runtime" in last:
            last["_wandb"] = {"runtime": int(last["_runtime"])}
        self._wandb.summary.update(last)

    def _row(self, record: Record) -> dict[str, Any]:
        texts = {f"{record.mode}/{name}": text for name, text in masked(record.texts).items()}
        row: dict[str, Any] = {valid_utf8(name): value for name, value in record.metrics.items()}
        row.update((valid_utf8(name), valid_utf8(text)) for name, text in texts.items())
        row.update(iteration=record.iteration, epoch=record.epoch)
        if record.timestamp:
            row["_timestamp"] = record.timestamp
            row["_runtime"] = round(record.timestamp - self._run.attempts[0].began, 3)
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
        import wandb

        path = own(self._run.run_dir, self._run.run_dir / one.path)
        name = "/".join(map(file_name, valid_utf8(one.name).split("/")))
        if one.kind == "image":
            return {name: wandb.Image(str(path))} if self._options["pictures"] else {}
        if one.kind == "artifact":
            self._output(name, "file", path)
            return {}
        text = path.read_text(encoding="utf-8")
        if one.kind == "text":
            return {name: wandb.Html(f"<pre>{html.escape(mask_text(text))}</pre>", data_is_not_path=True)}
        found = json.loads(text)
        if one.kind == "table":
            return {name: wandb.Table(columns=found["columns"], data=found["rows"], allow_mixed_types=True)}
        return {valid_utf8(each): _histogram(counted) for each, counted in found.items() if counted["bucket"]}

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
        objective = result.get("objective") or {}
        if (rule := objective.get("rule")) is not None:
            summary.update(_best_value(self._run.run_dir, objective["metric"], rule))
        best = result.get("best") or {}
        if best:
            summary["best"] = {name: best[name] for name in ("metric", "value", "iteration")}
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
        artifact = _artifact(f"{name}-{self._id}", kind, {"file": path.name})
        artifact.add_file(str(path))
        self._wandb.log_artifact(artifact, aliases=list(aliases))


def _written_at(path: Path) -> float:
    with suppress(OSError):  # a checkpoint may be deleted at any time
        return path.stat().st_mtime
    return 0.0


def _histogram(counted: Mapping[str, Any]) -> Any:
    import wandb

    edges: Any = [counted["min"], *counted["bucket_limit"]]
    return wandb.Histogram(np_histogram=(counted["bucket"], edges))


def _artifact(name: str, kind: str, about: Mapping[str, Any]) -> Any:
    import wandb

    return wandb.Artifact(file_name(name, _NOT_IN_ARTIFACTS, longest=_LONGEST), kind, metadata=dict(about))


def _best_value(run_dir: Path, metric: str, rule: str) -> dict[str, float]:
    """Return the best value of a metric in all validations, by its name in the summary."""
    records = read_all(run_dir / FILENAME)
    values = [record.values.get(metric, math.nan) for record in records if record.mode == "val"]
    values = [value for value in values if math.isfinite(value)]
    return {f"val/{metric}": (max if rule == "greater" else min)(values)} if values else {}


def kill_core() -> None:
    """Kill `wandb-core`, W&B's own process, which would continue to upload, and wait for its end."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.name() == "wandb-core":
                child.kill()
                child.wait(timeout=5)


def identity(options: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Return the names, group, tags and config as arguments of `wandb.init`, with secrets masked."""
    given = masked(options["init"])
    project = (
        masked(options["project"]) or os.environ.get("WANDB_PROJECT") or run.experiment.translate(_NOT_IN_PROJECTS)
    )
    group = os.environ.get("WANDB_RUN_GROUP") or ("" if run.sweep is None else run.sweep.name)
    names = {
        "project": project[:_LONGEST],
        "group": group[:_LONGEST] or None,
        "name": (os.environ.get("WANDB_NAME") or run.name)[:_LONGEST],
        **given,
    }
    return {**_as_json(names), "config": config_of(run)}


def config_of(run: Run) -> dict[str, Any]:
    """Return the first attempt's config. What later attempts changed is named `resume_<n>/optimizer/lr`.

    `hydraloop` has the uid, the command, the commit, …
    """
    first, *resumed = run.attempts
    config: dict[str, Any] = yaml.safe_load(first.config) or {}
    current = first.params
    for attempt in resumed:
        for name, value in attempt.params.items():
            if name not in current or current[name] != value:
                config[f"resume_{attempt.number}/{name.replace('.', '/')}"] = value  # W&B accepts no dots in names
        current = attempt.params
    found: dict[str, Any] = _as_json({**config, "hydraloop": {"uid": run.uid, **first.tags}})
    return found


def _as_json(value: Any) -> Any:
    """Return a value without surrogates; NaN and infinity become text."""
    return json.loads(json.dumps(value, ensure_ascii=False, default=str).encode(errors="replace"), parse_constant=str)

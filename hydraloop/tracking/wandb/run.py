"""A live W&B run. Contains the calls of W&B's library."""

from __future__ import annotations

import json
import logging
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from hydraloop.run.checkpoint_files import is_complete
from hydraloop.run.code_patch import FILENAME as PATCH_FILE
from hydraloop.run.record_log import Record
from hydraloop.run.result import FILENAME as RESULT_FILE
from hydraloop.safety.secrets import mask_text, masked
from hydraloop.tracking import description
from hydraloop.tracking.checkpoints import checkpoints
from hydraloop.tracking.tracker import Finish, Run, valid_utf8
from hydraloop.tracking.wandb.segments import FOLDER, Segment
from hydraloop.tracking.wandb.setup import identity, settings_of

log = logging.getLogger(__name__)


class LiveRun:
    """A W&B run to which rows can be logged.

    Args:
        options: the hook's options.
        run: the run that is sent.
        segment: the segment to open. Its `folder` and `url` are set.
        how: further arguments for `wandb.init`: `resume`, `resume_from`.
    """

    def __init__(self, options: dict[str, Any], run: Run, segment: Segment, **how: Any) -> None:
        import wandb

        self._options, self._run, self._segment = options, run, segment
        self.rows = 0
        """Number of rows that were logged by this object."""
        self._axes: set[str] = set()
        self._picture_told = False
        folder = run.run_dir / FOLDER
        before = {path.name for path in folder.glob("*run-*")}
        try:
            self._wandb = wandb.init(
                **identity(options, run, segment.part),
                dir=str(run.run_dir),
                mode=segment.mode,
                id=None if "resume_from" in how else segment.id,
                reinit="create_new",
                settings=settings_of(options, run),
                **how,
            )
        except BaseException:
            kill_core()
            for path in folder.glob("*run-*"):  # repeated tries would leave many folders
                if path.name not in before and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
            raise
        self._wandb.define_metric("iteration", hidden=True)
        segment.folder = Path(self._wandb.settings.sync_dir).name
        segment.url = self._wandb.url if segment.mode == "online" else None
        segment.closed = None
        if options.get("log_code"):
            self._save_code()

    @property
    def starts_at(self) -> int:
        """The step after the last one that the service had when the run was opened."""
        return int(self._wandb.starting_step)  # its `step` is 0 for a resumed run

    def log(self, record: Record) -> None:
        """Log a record as a row, with secrets in its texts masked."""
        mode = valid_utf8(record.mode)
        if mode not in self._axes:
            self._wandb.define_metric(f"{mode}/*", step_metric="iteration")
            self._axes.add(mode)
        texts = masked(dict(record.texts))
        row: dict[str, Any] = {valid_utf8(name): value for name, value in record.metrics.items()}
        row.update((valid_utf8(f"{mode}/{name}"), valid_utf8(text)) for name, text in texts.items())
        row.update(iteration=record.iteration, epoch=record.epoch)
        if record.timestamp:
            row["_timestamp"] = record.timestamp
        for one in record.objects:
            if one.kind == "image" and self._options["pictures"]:
                row.update(self._picture(valid_utf8(one.name), one.path))
        self._wandb.log(row, step=record.index, commit=True)
        self.rows += 1

    def log_checkpoints(self, best: str | None = None, *, ended: bool) -> None:
        """Log selected checkpoints as artifacts, unless they are logged already.

        Args:
            best: path of the best checkpoint.
            ended: whether the run has ended.
        """
        import wandb

        for path in checkpoints(self._run, self._options["checkpoints"], best, ended=ended):
            if path.name in self._segment.artifacts or not is_complete(path):
                continue
            artifact = wandb.Artifact(f"checkpoint-{self._segment.id}", type="model", metadata={"file": path.name})
            artifact.add_file(str(path))
            self._wandb.log_artifact(artifact, aliases=["latest", path.stem])
            self._segment.artifacts.append(path.name)

    def finish(self, finish: Finish) -> None:
        """Write the summary, `result.json` and the checkpoints, and close the run."""
        summary: dict[str, Any] = {"status": finish.status}
        if finish.error is not None:
            summary["error"] = valid_utf8(finish.error)
        best = self._result()
        if best is not None:
            summary["best"] = {name: best[name] for name in ("metric", "value", "iteration")}
        self._wandb.summary.update(summary)
        self.log_checkpoints(None if best is None else best["checkpoint"], ended=True)
        self._wandb.finish(exit_code=finish.exit_code)

    def _result(self) -> dict[str, Any] | None:
        """Save `result.json` if it belongs to this attempt. Returns its entry `best`."""
        run_dir = self._run.run_dir
        best: dict[str, Any] | None = None
        if description.result_digest(run_dir) != self._run.attempt.earlier_result:
            with suppress(OSError, ValueError):
                text = (run_dir / RESULT_FILE).read_text(encoding="utf-8")
                best = json.loads(text).get("best")
                copy = Path(self._wandb.dir) / RESULT_FILE
                copy.write_text(mask_text(text), encoding="utf-8")
                self._wandb.save(str(copy), base_path=self._wandb.dir, policy="now")
        return best

    def _save_code(self) -> None:
        """Save the uncommitted changes of each attempt's code."""
        for attempt in self._run.attempts:
            if attempt.patch is not None:
                copy = Path(self._wandb.dir, f"resume_{attempt.number}" if attempt.number else "", PATCH_FILE)
                with suppress(OSError):
                    copy.parent.mkdir(exist_ok=True)
                    shutil.copyfile(self._run.run_dir / attempt.patch, copy)
                    self._wandb.save(str(copy), base_path=self._wandb.dir, policy="now")

    def _picture(self, name: str, path: str) -> dict[str, Any]:
        import wandb

        try:
            return {name: wandb.Image(str(self._run.run_dir / path))}
        except Exception as error:  # a damaged file can raise any error
            level = logging.INFO if self._picture_told else logging.WARNING
            log.log(level, "picture %s cannot be read, its record is sent to W&B without it: %s", path, error)
            self._picture_told = True
            return {}


def kill_core() -> None:
    """Kill `wandb-core`, W&B's own process, which would continue to upload, and wait for its end."""
    cores = [child for child in psutil.Process().children() if _is_core(child)]
    for core in cores:
        with suppress(psutil.Error):
            core.kill()
    psutil.wait_procs(cores, timeout=5)


def _is_core(process: psutil.Process) -> bool:
    try:
        return process.name() == "wandb-core"
    except psutil.Error:
        return False

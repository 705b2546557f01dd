"""A run's files as MLflow artifacts: its config, pictures, result and checkpoints.

Metrics have precedence: files are listed in the tracker's memory and stored while there are no records to send.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraloop.run.checkpoint_files import is_complete
from hydraloop.run.record_log import Record
from hydraloop.run.result import FILENAME as RESULT_FILE
from hydraloop.safety.secrets import mask_text
from hydraloop.tracking import description
from hydraloop.tracking.mlflow.calls import Calls
from hydraloop.tracking.mlflow.names import in_file_name
from hydraloop.tracking.tracker import RefusedError, Run, UnusableError

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Folder of the artifacts."""


class Files:
    """The artifacts of one run.

    Args:
        memory: the tracker's memory. `due`: what is to be stored; `stored`: checkpoint files by name, with size and
            time; `no_files`: whether the server cannot store files.
    """

    def __init__(self, client: MlflowClient, run_id: str, run: Run, calls: Calls, memory: dict[str, Any]) -> None:
        self._client, self._run_id, self._run, self._calls, self._memory = client, run_id, run, calls, memory
        self._due: list[dict[str, Any]] = memory.setdefault("due", [])
        self._stored: dict[str, list[int]] = memory.setdefault("stored", {})
        self._told = False
        """Whether a warning about a skipped file was logged."""
        self._sure = False
        """Whether it is certain that the first picture in `due` was not stored by an earlier try."""

    def add_config(self, attempt: int) -> None:
        """Schedule an attempt's config for storing."""
        self._due.append({"config": attempt})

    def add_code(self, attempt: int) -> None:
        """Schedule the uncommitted changes of an attempt's code for storing."""
        if self._run.attempts[attempt].patch is not None:
            self._due.append({"code": attempt})

    def add_pictures(self, records: Sequence[Record]) -> None:
        """Schedule the pictures of records for storing. Records that are sent again do not add their pictures again."""
        last = self._memory.get("last_picture", -1)
        for record in records:
            for shown in (one for one in record.objects if one.kind == "image"):
                one = {
                    "picture": shown.path,
                    "key": in_file_name(shown.name),
                    "step": record.iteration,
                    "timestamp": round(record.timestamp * 1000),
                }
                if one not in self._due and record.index > last:
                    self._due.append(one)
                    self._memory["last_picture"] = record.index

    def store(self) -> bool:
        """Store the next scheduled file. Returns whether there was one."""
        if not self._due:
            return False
        self._guarded(self._store, self._due[0])
        self._due.pop(0)
        return True

    def store_all(self) -> None:
        """Store all scheduled files."""
        while self.store():
            pass

    def store_result(self) -> None:
        """Store `result.json` if it belongs to this attempt."""
        path = result_of(self._run)
        if path is not None:
            self._guarded(self._text, mask_text(path.read_text(encoding="utf-8")), RESULT_FILE)

    def store_checkpoints(self, paths: list[Path], *, most: int = 1 << 62) -> bool:
        """Store the checkpoint files that are complete and have changed. Returns whether there was one."""
        found = 0
        for path in paths:
            if found == most:
                break
            try:
                state = path.stat()
            except FileNotFoundError:
                continue
            mark = [state.st_size, state.st_mtime_ns]
            if self._stored.get(path.name) == mark or not is_complete(path):
                continue
            self._guarded(self._file, path, CHECKPOINTS)
            self._stored[path.name] = mark
            found += 1
        return found > 0

    def _guarded(self, store: Any, *arguments: Any) -> None:
        """Call `store`. If the server cannot store files at all, log one warning and skip all further files."""
        if self._memory.get("no_files"):
            return
        try:
            store(*arguments)
        except RefusedError as error:
            self._left_out(f"a file is not stored: {error}")
        except (UnusableError, ImportError, PermissionError, NotADirectoryError) as error:
            self._memory["no_files"] = True
            log.warning("files (config, pictures, result, checkpoints) are not stored, only metrics are: %s", error)

    def _left_out(self, text: str) -> None:
        """Warn about the first skipped file; log the others at level INFO."""
        log.log(logging.INFO if self._told else logging.WARNING, "%s", text)
        self._told = True

    def _store(self, one: dict[str, Any]) -> None:
        if "config" in one:
            number = one["config"]
            name = "config.yaml" if number == 0 else f"config_resume_{number}.yaml"
            self._text(self._run.attempts[number].config, name)
        elif "code" in one:
            number = one["code"]
            patch = self._run.run_dir / str(self._run.attempts[number].patch)
            self._file(patch, None if number == 0 else f"resume_{number}")
        else:
            self._picture(self._run.run_dir / one["picture"], one["key"], one["step"], one["timestamp"])

    def _text(self, text: str, name: str) -> None:
        with self._calls():
            self._client.log_text(self._run_id, text, name)

    def _picture(self, path: Path, key: str, step: int, timestamp: int) -> None:
        from PIL import Image

        try:
            with Image.open(path) as opened:
                opened.load()
                picture = opened.convert("RGB") if opened.mode not in ("RGB", "RGBA", "L") else opened.copy()
        except Exception as error:  # decoders raise any error for a damaged file
            self._left_out(f"a picture is not stored: {path}: {getattr(error, 'strerror', None) or error}")
            return
        with self._calls():
            if self._sure or not self._has_picture(f"{key}+step+{step}+timestamp+{timestamp}+"):
                self._sure = False
                self._client.log_image(self._run_id, picture, key=key, step=step, timestamp=timestamp)
        self._sure = True

    def _has_picture(self, start: str) -> bool:
        """Return whether a picture is stored completely: its small copy is stored last. Older versions use `%`."""
        names = (
            info.path.rpartition("/")[2].replace("%", "+")
            for info in self._client.list_artifacts(self._run_id, "images")
        )
        return any(name.startswith(start) and "+compressed" in name for name in names)

    def _file(self, path: Path, folder: str | None) -> None:
        try:
            with self._calls(files=True):
                self._client.log_artifact(self._run_id, str(path), folder)
        except FileNotFoundError:
            log.info("%s was deleted before it was stored", path)


def result_of(run: Run) -> Path | None:
    """Return the path of `result.json` if it belongs to the current attempt, else None."""
    digest = description.result_digest(run.run_dir)
    return None if digest in (None, run.attempt.earlier_result) else run.run_dir / RESULT_FILE


def best_of(run: Run) -> dict[str, Any]:
    """Return `best` of the current attempt's `result.json`, or an empty dict."""
    path = result_of(run)
    try:
        found = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return (found.get("best") if isinstance(found, dict) else None) or {}

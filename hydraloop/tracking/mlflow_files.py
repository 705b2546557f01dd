"""A run's files as MLflow artifacts: its config, the objects of its records, its result and its checkpoints.

They are listed in the tracker's memory and stored one at a time, so that metrics do not wait for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraloop.files.atomic import file_name
from hydraloop.files.checkpoint_files import is_complete
from hydraloop.files.record_log import Record
from hydraloop.files.result import FILENAME as RESULT_FILE
from hydraloop.files.secrets import mask_text
from hydraloop.tracking import run_description
from hydraloop.tracking.tracker import RefusedError, Run, own

if TYPE_CHECKING:
    from mlflow import MlflowClient

CHECKPOINTS = "checkpoints"
"""Folder of the artifacts."""
_NOT_IN_A_KEY = r"[^A-Za-z0-9_\-./ ]"
"""What `log_image` refuses in a picture's key."""


class Files:
    """The artifacts of one run. `memory`: `due`, what is to be stored."""

    def __init__(
        self, client: MlflowClient, run_id: str, run: Run, options: Mapping[str, Any], memory: dict[str, Any]
    ) -> None:
        self._client, self._run_id, self._run, self._options = client, run_id, run, options
        self.due: list[dict[str, Any]] = memory.setdefault("due", [])
        self._there: list[str] | None = None
        """Beginnings of the paths of the stored pictures; None: they are not known, because a call may have failed."""

    def add_attempt(self, number: int) -> None:
        """Schedule an attempt's config for storing, and with `log_code` its uncommitted changes."""
        self.due.append({"config": number})
        if self._options.get("log_code") and self._run.attempts[number].patch is not None:
            self.due.append({"code": number})

    def add_objects(self, records: Sequence[Record]) -> None:
        """Schedule the objects of records for storing."""
        for record in records:
            place = {"index": record.index, "step": record.iteration, "time": round(record.timestamp * 1000)}
            self.due.extend({"kind": one.kind, "name": one.name, "path": one.path, **place} for one in record.objects)

    def add_end(self) -> None:
        """Schedule the result for storing, and the checkpoints that the options select."""
        self.due.append({"end": self._run.attempt.number})

    def store(self, one: Mapping[str, Any]) -> None:
        """Store what is scheduled.

        Raises:
            RefusedError: a file is damaged, or is no file of the run.
        """
        run_dir = self._run.run_dir
        if "config" in one:
            number = one["config"]
            name = "config.yaml" if number == 0 else f"config_resume_{number}.yaml"
            self._client.log_text(self._run_id, self._run.attempts[number].config, name)
        elif "code" in one:
            number = one["code"]
            patch = own(run_dir, run_dir / str(self._run.attempts[number].patch))
            self._client.log_artifact(self._run_id, str(patch), None if number == 0 else f"resume_{number}")
        elif "end" in one:
            self._store_end()
        else:
            self._store_object(own(run_dir, run_dir / one["path"]), one)

    def _store_end(self) -> None:
        result = run_description.result_of(self._run.run_dir, self._run.attempt)
        if result:
            text = own(self._run.run_dir, self._run.run_dir / RESULT_FILE).read_text(encoding="utf-8")
            self._client.log_text(self._run_id, mask_text(text), RESULT_FILE)
        best = (result.get("best") or {}).get("checkpoint")
        which, foreign = self._options.get("checkpoints"), bool(self._options.get("_sync"))
        for path in run_description.checkpoints(self._run, which, best, ended=True, foreign=foreign):
            if is_complete(path):
                self._client.log_artifact(self._run_id, str(path), CHECKPOINTS)

    def _store_object(self, path: Path, one: Mapping[str, Any]) -> None:
        """Store an object of a record under its path in the run directory; pictures where MLflow's charts find them."""
        if one["kind"] == "image":
            self._store_picture(path, one)
        elif one["kind"] == "table":
            self._client.log_dict(self._run_id, _read(_table, path), one["path"])
        else:
            self._client.log_artifact(self._run_id, str(path), one["path"].rpartition("/")[0] or None)

    def _store_picture(self, path: Path, one: Mapping[str, Any]) -> None:
        """Store a picture, unless a call that failed halfway has: MLflow gives it another name each time."""
        key = "/".join(file_name(part, _NOT_IN_A_KEY) for part in one["name"].split("/"))
        name = f"images/{key.replace('/', '~')}+step+{one['step']}+timestamp+{one['time']}+"
        there = self._there
        if there is None:
            there = [file.path for file in self._client.list_artifacts(self._run_id, "images")]
        if any(other.startswith(name) for other in there):
            self._client.set_tag(self._run_id, "mlflow.loggedImages", "True")
        else:
            picture, self._there = _read(_picture, path), None
            self._client.log_image(self._run_id, picture, key=key, step=one["step"], timestamp=one["time"])
        self._there = [*there, name]


def _table(path: Path) -> dict[str, Any]:
    table = json.loads(path.read_bytes())
    return {"columns": table["columns"], "data": table["rows"]}


def _picture(path: Path) -> Any:
    from PIL import Image

    with Image.open(path) as picture:
        return picture.convert(picture.mode if picture.mode in ("RGB", "RGBA") else "RGB")


def _read(read: Callable[[Path], Any], path: Path) -> Any:
    """Read a file, which may be damaged."""
    try:
        return read(path)
    except Exception as error:  # decoders raise any error
        raise RefusedError(f"{path}: {getattr(error, 'strerror', None) or error!r}") from error

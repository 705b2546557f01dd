"""A run's files as MLflow artifacts: its config, the objects of its records, its result, its checkpoints and its model.

They are listed in the tracker's memory and stored one at a time, so that metrics do not wait for them.
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hydraloop.run_files.atomic import file_name
from hydraloop.run_files.checkpoint_files import is_complete
from hydraloop.run_files.record_log import Record
from hydraloop.run_files.result import FILENAME as RESULT_FILE
from hydraloop.safety.secrets import mask_text
from hydraloop.tracking import run_description
from hydraloop.tracking.own_files import own
from hydraloop.tracking.tracker import GoneError, RefusedError, Run, UnusableError

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Folder of the artifacts."""
_SMALL = 256
"""Pixels of the longer side of a picture's small copy, as MLflow makes it. The page shows the copies first."""
_NOT_IN_A_KEY = r"[^A-Za-z0-9_\-.~ ]"
"""What `log_image` refuses in a picture's key."""
_TABLES = 40
"""Tables that the page shows as such, the newest ones; a tag lists them, whose length is limited."""


class Files:
    """The artifacts of one run.

    `memory`: `due`, what is to be stored; `stored`, the result, checkpoints and the model by name, with size and time;
    `tables`, paths of stored tables.
    """

    def __init__(
        self,
        client: MlflowClient,
        run_id: str,
        run: Run,
        calls: Callable[[], AbstractContextManager[None]],
        options: Mapping[str, Any],
        memory: dict[str, Any],
    ) -> None:
        self._client, self._run_id, self._run, self._calls, self._memory = client, run_id, run, calls, memory
        self._options = options
        self._due: list[dict[str, Any]] = memory.setdefault("due", [])
        self._stored: dict[str, list[int]] = memory.setdefault("stored", {})
        self._warned = self._tagged = self._hopeless = False
        """Whether a skipped file was reported, the run is known to have pictures, and no files can be stored."""

    def add_attempt(self, number: int) -> None:
        """Schedule an attempt's config for storing, and with `log_code` its uncommitted changes."""
        self._due.append({"config": number})
        if self._options.get("log_code") and self._run.attempts[number].patch is not None:
            self._due.append({"code": number})

    def add_objects(self, records: Sequence[Record]) -> None:
        """Schedule the objects of records for storing."""
        for record in records:
            for one in record.objects:
                if one.kind != "image" or self._options.get("pictures", True):
                    place = {"index": record.index, "step": record.iteration, "time": round(record.timestamp * 1000)}
                    self._due.append({"kind": one.kind, "name": one.name, "path": one.path, **place})

    def store(self, *, ended: bool) -> bool:
        """Store the next file; after the run has ended, also its result. Returns whether there was one."""
        if self._due:
            if not self._guarded(self._due[0]):
                return False
            self._due.pop(0)
            return True
        for path in self._written(ended):
            try:
                state = path.stat()
            except FileNotFoundError:
                continue
            mark = [state.st_size, state.st_mtime_ns]
            if self._stored.get(path.name) != mark and (path.suffix == ".json" or is_complete(path)):
                if not self._guarded({"file": path}):
                    return False
                self._stored[path.name] = mark
                return True
        return False

    def _written(self, ended: bool) -> Iterator[Path]:
        """Yield the result, and the checkpoints that the options select."""
        result = run_description.result_of(self._run.run_dir, self._run.attempt) if ended else {}
        if result:
            yield self._run.run_dir / RESULT_FILE
        best = (result.get("best") or {}).get("checkpoint")
        which, foreign = self._options.get("checkpoints"), bool(self._options.get("_sync"))
        yield from run_description.checkpoints(self._run, which, best, ended=ended, foreign=foreign)

    def _guarded(self, one: Mapping[str, Any]) -> bool:
        """Store a file, or skip it if it is refused; only the first skipped file is a warning.

        If the server cannot store files at all, log one warning and return False, also for all further files: the
        next process tries again.
        """
        if self._hopeless:
            return False
        try:
            with self._calls():
                self._store(one)
        except GoneError:
            raise
        except (RefusedError, FileNotFoundError) as error:
            log.log(logging.INFO if self._warned else logging.WARNING, "a file is not stored: %s", error)
            self._warned = True
        except (UnusableError, ImportError, PermissionError, NotADirectoryError) as error:
            self._hopeless = True
            log.warning("files (config, pictures, result, checkpoints) are not stored, only metrics are: %s", error)
        return not self._hopeless

    def _store(self, one: Mapping[str, Any]) -> None:
        client, run_id = self._client, self._run_id
        if "config" in one:
            number = one["config"]
            name = "config.yaml" if number == 0 else f"config_resume_{number}.yaml"
            client.log_text(run_id, self._run.attempts[number].config, name)
        elif "code" in one:
            number = one["code"]
            patch = own(self._run.run_dir, self._run.run_dir / str(self._run.attempts[number].patch))
            client.log_artifact(run_id, str(patch), None if number == 0 else f"resume_{number}")
        elif "file" not in one:
            self._store_object(one)
        elif one["file"].name == RESULT_FILE:
            text = own(self._run.run_dir, one["file"]).read_text(encoding="utf-8")
            client.log_text(run_id, mask_text(text), RESULT_FILE)
        else:
            client.log_artifact(run_id, str(one["file"]), CHECKPOINTS)

    def _store_object(self, one: Mapping[str, Any]) -> None:
        """Store an object of a record under its path in the run directory; pictures where MLflow's charts find them."""
        path = own(self._run.run_dir, self._run.run_dir / one["path"])
        if one["kind"] == "image":
            self._store_picture(path, one)
        elif one["kind"] == "table":
            self._store_table(path, one["path"])
        else:
            self._client.log_artifact(self._run_id, str(path), one["path"].rpartition("/")[0] or None)

    def _store_table(self, path: Path, name: str) -> None:
        """Store a table in the form of `log_table`, which imports pandas."""
        try:
            table = json.loads(path.read_bytes())
            shown = {"columns": table["columns"], "data": table["rows"]}
        except (ValueError, KeyError, TypeError) as error:
            raise RefusedError(f"{path} does not contain a table ({error!r})") from error
        self._client.log_text(self._run_id, json.dumps(shown, ensure_ascii=False), name)
        self._memory["tables"] = [*(one for one in self._memory.get("tables", []) if one != name), name][-_TABLES:]
        listed = [{"path": one, "type": "table"} for one in self._memory["tables"]]
        self._client.set_tag(self._run_id, "mlflow.loggedArtifacts", json.dumps(listed))

    def _store_picture(self, path: Path, one: Mapping[str, Any]) -> None:
        """Store a picture and a small copy of it as `log_image` does, but under the same names if it is repeated."""
        from PIL import Image

        same = uuid.uuid5(uuid.NAMESPACE_OID, f"{self._run.uid}/{one['name']}/{one['step']}/{one['time']}")
        key = file_name(
            one["name"].replace("/", "~"), _NOT_IN_A_KEY
        )  # the page shows val~predictions as val/predictions
        name = f"{key}+step+{one['step']}+timestamp+{one['time']}+{same}"
        with TemporaryDirectory() as folder:
            try:
                with Image.open(path) as picture:
                    small = picture if picture.mode in ("RGB", "RGBA") else picture.convert("RGB")
                    small.thumbnail((_SMALL, _SMALL))
                    small.save(Path(folder, f"{name}+compressed.webp"))
            except Exception as error:  # decoders raise any error for a damaged file
                raise RefusedError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
            shutil.copyfile(path, Path(folder, name + path.suffix))
            self._client.log_artifacts(self._run_id, folder, "images")
        if not self._tagged:
            self._client.set_tag(self._run_id, "mlflow.loggedImages", "True")
            self._tagged = True

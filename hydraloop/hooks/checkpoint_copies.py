"""Copies of checkpoints: in another folder (`out_dir`), and published ones with the weights only."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hydraloop.engine.checkpoint.format import evaluation_weights, load, write
from hydraloop.engine.checkpoint.shards import apart
from hydraloop.errors import UserError, suggestion
from hydraloop.files import atomic, integrity, run_directory
from hydraloop.files.checkpoint_files import LAST, PUBLISHED, SUFFIX, UNFINISHED, point_to, remove_old_shards
from hydraloop.files.config_yaml import plain
from hydraloop.files.integrity import SAFETENSORS, SHARDS

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder of checkpoints.

    Args:
        path: the folder; `open` creates it.
    """

    path: Path

    def open(self, run_dir: Path, resumed: Path | None, *, key: str) -> None:
        """Create the folder, try to write to it, and record it in the run directory.

        Args:
            run_dir: of the run.
            resumed: the folder of the checkpoint that the run is resumed from; None: a new run.
            key: the option that names the folder, for errors.

        Raises:
            UserError: it cannot be written to, is a folder of Python packages, or contains checkpoints of another run.
        """
        if self.path.resolve().name in ("site-packages", "dist-packages"):
            raise UserError(
                f"Python reads .pth files in {self.path} when it starts, and would read checkpoints as such",
                key=key,
                remedy="Use another folder.",
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".{os.getpid()}.part"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written to: {error.strerror or error}",
                key=key,
                remedy="Use a folder that you may write to.",
            ) from error

        own = run_directory.checkpoint_folders(run_dir) + ([] if resumed is None else [resumed])
        if self.path.resolve() not in map(Path.resolve, own) and any(self.path.glob(f"*{SUFFIX}")):
            raise UserError(
                f"{self.path} has checkpoints of another run, which would be overwritten",
                key=key,
                remedy="Use a separate folder for each run.",
            )
        run_directory.record_checkpoint_folder(run_dir, self.path)

    def remove_unfinished(self) -> None:
        """Remove checkpoints, shards and published files that a killed process left unfinished.

        Only the process that trains in the run directory may call it, before its first save.
        """
        atomic.remove_unfinished(self.path / LAST)
        for folder in self.path.glob(f"*{SHARDS}*"):
            remove_old_shards(self.path / f"{folder.name.rpartition(SHARDS)[0]}{SUFFIX}")
        for part in self.path.glob(".*.part"):
            if not UNFINISHED.fullmatch(part.name):
                continue
            try:
                if part.is_dir():
                    shutil.rmtree(part)
                else:
                    part.unlink()
            except OSError as error:
                log.warning("%s, unfinished, could not be removed: %s", part, error.strerror or error)

    def resume_from(self, path: Path, run_dir: Path) -> None:
        """Make later starts resume from `path`, even if this run is killed before its first checkpoint.

        Does nothing if the file does not belong to the run.
        """
        folder = path.resolve().parent
        if folder == self.path.resolve() or folder.is_relative_to(run_dir.resolve()):
            point_to(path)

    def relative(self, path: Path) -> str:
        """Return a file's name for a checkpoint's state: relative if it is in the folder, so that both can be moved."""
        return str(path.relative_to(self.path)) if path.is_relative_to(self.path) else str(path.resolve())


ENTRIES = ("format", "meta", "state_dict", "optimizer", "schedulers", "hooks", "precision", "rng", "progress")
"""Entries of a checkpoint that a published file can keep."""


def check_keys(keys: Sequence[str]) -> None:
    """Reject keys that no checkpoint has.

    Raises:
        UserError: a key is unknown; names similar ones.
    """
    for key in keys:
        if key not in ENTRIES:
            raise UserError(
                f"a checkpoint has no {key!r}",
                key="published_keys",
                remedy=suggestion(key, ENTRIES) + " For the weights and their origin, use [meta,state_dict].",
            )


def published_files(path: Path) -> tuple[Path, Path]:
    """Return the paths of the files published from a checkpoint: the `.pth` and the `.safetensors`."""
    target = path.with_name(f"{path.stem}{PUBLISHED}{SUFFIX}")
    return target, target.with_suffix(SAFETENSORS)


def publish(path: Path, keys: Sequence[str], weights: str) -> list[Path]:
    """Write `<stem>_published.pth` next to a checkpoint, with those of the `keys` that it has.

    With `state_dict` among them, also write `<stem>_published.safetensors`: the same weights under the same names, and
    the plain values of `meta` as JSON, under `meta` in the file's metadata. If the state dict contains something that
    safetensors does not support, this file is not written and a line in the log gives the reason.

    Args:
        weights: `averaged`: `state_dict` is the averaged weights if there are any; `raw`: the raw ones.

    Returns:
        The files written, the `.pth` first.
    """
    checkpoint = load(path, key="published_keys")
    published = {entry: checkpoint[entry] for entry in keys if entry in checkpoint}
    if "state_dict" in published:
        published["state_dict"] = evaluation_weights(checkpoint, weights)
    if "meta" in published:
        # The state dict now is the averaged weights.
        facts = {name: fact for name, fact in checkpoint["meta"].items() if name != "averaged_weights"}
        published["meta"] = {**facts, "published_from": path.name}
    target, tensors = published_files(path)
    write(target, published)
    if "state_dict" not in published:
        return [target]
    obstacle = write_safetensors(tensors, published["state_dict"], published.get("meta"), like=target)
    if obstacle is not None:
        log.info("%s is not written: %s", tensors.name, obstacle)
        tensors.unlink(missing_ok=True)  # from an earlier run, with other weights
        return [target]
    return [target, tensors]


def write_safetensors(
    path: Path, state: Mapping[str, Any], meta: Mapping[str, Any] | None, *, like: Path
) -> str | None:
    """Write a state dict, its checksum, and plain values of `meta`, with the file mode of `like`.

    Returns:
        Why that is not possible, or None.

    Raises:
        OSError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        return f"{others[0]} is a {type(state[others[0]]).__name__}, not a tensor"
    # transformers and others require the format entry.
    facts = {"format": "pt", integrity.CHECKSUM: integrity.NO_CHECKSUM}
    if meta is not None:
        facts["meta"] = json.dumps(plain(meta), default=lambda value: None)  # a tensor, which has no JSON form
    try:
        with atomic.replacing(path) as unfinished:
            save_file(apart(state), unfinished, metadata=facts)
            integrity.seal(unfinished)
            unfinished.chmod(like.stat().st_mode & 0o777)  # safetensors makes it readable for this user only
    except SafetensorError as error:  # with the message of the operating system
        raise OSError(f"{path} cannot be written: {error}") from error
    except (ValueError, KeyError) as error:  # sparse and quantized tensors, complex128
        return f"safetensors has no {error}" if isinstance(error, KeyError) else str(error)
    return None

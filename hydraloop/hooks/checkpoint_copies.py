"""Published copies of checkpoints, with the weights only."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hydraloop.engine.checkpoint.format import evaluation_weights, load, write
from hydraloop.engine.checkpoint.shards import apart
from hydraloop.errors import UserError, suggestion
from hydraloop.files import atomic, integrity
from hydraloop.files.checkpoint_files import PUBLISHED, SUFFIX
from hydraloop.files.config_yaml import plain
from hydraloop.files.integrity import SAFETENSORS

log = logging.getLogger(__name__)


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


def publish_all(checkpoints: Iterable[Path], keys: Sequence[str], weights: str) -> None:
    """Publish each checkpoint that exists. A file that cannot be written is a warning."""
    for path in checkpoints:
        if not path.is_file():  # a copy of a run may lack files
            continue
        try:
            for file in publish(path, keys, weights):
                log.info("published %s", file)
        except OSError as error:
            log.warning("%s is complete, but could not be published: %s", path, error.strerror or error)


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
        facts["meta"] = json.dumps(plain(meta), default=lambda value: None)  # a value without a JSON form
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

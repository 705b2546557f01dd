"""Published files: a checkpoint without what only its own run needs, and its weights as safetensors."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hydraloop.engine.checkpoint.format import evaluation_weights, load, write
from hydraloop.errors import UserError, suggestion
from hydraloop.run import atomic
from hydraloop.run.checkpoint_files import PUBLISHED, SAFETENSORS, SUFFIX
from hydraloop.run.config_yaml import plain

log = logging.getLogger(__name__)

ENTRIES = ("format", "meta", "state_dict", "optimizer", "schedulers", "hooks", "precision", "rng", "progress")
"""What a checkpoint has, and a published file can keep."""


def check_keys(keys: Sequence[str], left_out: Sequence[str], *, of_any: bool) -> None:
    """Refuse to publish nothing, or a key that no checkpoint of the run will have.

    Args:
        left_out: entries that the run does not save.
        of_any: whether there is a checkpoint to publish: the last one, or a best one.

    Raises:
        UserError: there is none, or one is unknown; names the close ones.
    """
    weights_and_more = "For the weights and where they come from: [meta,state_dict]."
    if not keys:
        raise UserError(
            "a published file would have nothing in it",
            key="published_keys",
            remedy=f"Use null for no such files. {weights_and_more}",
        )
    if not of_any:
        raise UserError(
            "there is nothing to publish: no last checkpoint (save_last=false) and no best one (save_best)",
            key="published_keys",
            remedy="Set save_last=true or save_best=auto, or published_keys=null.",
        )
    there = [entry for entry in ENTRIES if entry not in left_out]
    for key in keys:
        if key not in there:
            raise UserError(
                f"a checkpoint of this run has no {key!r}",
                key="published_keys",
                remedy=f"{suggestion(key, there)} {weights_and_more}",
            )


def published_files(path: Path) -> tuple[Path, Path]:
    """Where the files published of a checkpoint are, or would be: the `.pth` and the `.safetensors`."""
    target = path.with_name(f"{path.stem}{PUBLISHED}{SUFFIX}")
    return target, target.with_suffix(SAFETENSORS)


def publish(path: Path, keys: Sequence[str], weights: str) -> list[Path]:
    """Write `<stem>_published.pth` beside a checkpoint, with only the `keys` of it.

    With `state_dict` among them, `<stem>_published.safetensors` too: the same weights by the same names and, of `meta`,
    the plain facts as JSON, under `meta` in the file's own metadata. Not where the state dict holds anything that such
    a file cannot; a line in the log says so.

    Args:
        weights: `averaged`: its `state_dict` is the averaged weights where there are any; `raw`: the raw ones.

    Returns:
        The files written, the `.pth` first.
    """
    checkpoint = load(path, key="published_keys")
    published = {entry: checkpoint[entry] for entry in keys}
    if "state_dict" in published:
        published["state_dict"] = evaluation_weights(checkpoint, weights)
    if "meta" in published:
        # They are the state dict now; who loads the file must not look for them among the hooks.
        facts = {name: fact for name, fact in checkpoint["meta"].items() if name != "averaged_weights"}
        published["meta"] = {**facts, "published_from": path.name}
    target, tensors = published_files(path)
    write(target, published)
    if "state_dict" not in published:
        return [target]
    obstacle = _write_safetensors(tensors, published["state_dict"], published.get("meta"), like=target)
    if obstacle is not None:
        log.info("%s is not written: %s", tensors.name, obstacle)
        tensors.unlink(missing_ok=True)  # of an earlier run, and not these weights
        return [target]
    return [target, tensors]


def _write_safetensors(
    path: Path, state: Mapping[str, Any], meta: Mapping[str, Any] | None, *, like: Path
) -> str | None:
    """Write a state dict, readable to whom the file `like` is. Returns what stands in the way, None where nothing does.

    Raises:
        OSError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        return f"{others[0]} is a {type(state[others[0]]).__name__}, not a tensor"
    # The format is the kind of tensors, as transformers and others ask for it.
    facts = {"format": "pt"} if meta is None else {"format": "pt", "meta": json.dumps(plain(_facts(meta)))}
    try:
        with atomic.replacing(path) as unfinished:
            save_file(_apart(state), unfinished, metadata=facts)
            unfinished.chmod(like.stat().st_mode & 0o777)  # it would be this user's alone
    except SafetensorError as error:  # what the system says is in its text
        raise OSError(f"{path} cannot be written: {error}") from error
    except (ValueError, KeyError) as error:  # sparse and quantized tensors, complex128
        return f"safetensors has no {error}" if isinstance(error, KeyError) else str(error)
    return None


def _apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, each in memory of its own: safetensors refuses shared ones, and strict loading wants every name."""
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, value in state.items():
        apart[name] = value
        if value.layout is torch.strided:  # it refuses the others
            storage = value.untyped_storage().data_ptr()
            apart[name] = value.clone(memory_format=torch.contiguous_format) if storage in seen else value.contiguous()
            seen.add(storage)
    return apart


def _facts(value: Any) -> Any:
    """Leave out what JSON does not have."""
    if isinstance(value, Mapping):
        return {name: _facts(item) for name, item in value.items() if _is_fact(item)}
    return [_facts(item) for item in value if _is_fact(item)] if isinstance(value, list | tuple) else value


def _is_fact(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple | Mapping)

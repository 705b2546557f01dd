"""The checkpoint format: a dict, written atomically and loaded without pickle::

format      1
meta        experiment_name, time, versions, git, seed, the config as YAML, the names of metrics, progress;
            seconds: wall-clock time of all attempts;
            metrics: of the last validation; best: (metric, whether high values are good, value, iteration);
            ranks, ranks_per_node: the number of ranks that trained, in all and on one machine;
            batch_size: samples of a global batch; order: a checksum of the order of the epoch;
            optimizer: its class; with several optimizers, {name: class};
            groups: the optimizer of each parameter group, and the names of its parameters in the model;
            records: the number of lines that `metrics.jsonl` had at this position, with the `logger` hook;
            given: the keys of finished objects from Python; changes_evaluation: of hooks among them that metrics need;
            averaged_weights: the name of the hook that has them, if one does;
            published_from: in a published file, the name of its checkpoint
state_dict  of the raw model
task        only if not empty: the state dict of the task without the model (queues, teachers)
optimizer   its state_dict; with several optimizers, {name: state_dict}
schedulers  {name: state_dict}
hooks       {name: state_dict}, of the hooks that have one
precision   the gradient scaler's state in fp16
rng         the states of all random number generators
progress    epoch, iteration, optimizer step, samples, the position in the epoch, the last validation
data        only if its position does not follow from the progress: the state of the train loader on each rank
buffers     only if some differ between the ranks: those of each rank, but for the first (see `rank_buffers.py`)
messages    only if there are values since the last record: their sums by name, on each rank
shards      only in a file of FSDP2, and not after loading: the files with the sharded tensors (see `shards.py`)
"""

from __future__ import annotations

import pickle
import re
import shlex
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hydraloop.engine.checkpoint import shards
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.progress import Progress
from hydraloop.errors import UserError, missing_path
from hydraloop.files import atomic
from hydraloop.files.checkpoint_files import intact_before, is_complete
from hydraloop.files.integrity import SAFETENSORS, damage, expands, shards_of

FORMAT = 1
EVALUATED = ("state_dict", "task", "hooks")
"""The entries with tensors that an evaluation needs."""

Checkpoint = dict[str, Any]

_ALONE = Distributed()

_STATE_DICT_ALONE = (
    "import sys, torch; c = torch.load(sys.argv[1], map_location='cpu', weights_only=False); "
    "c = c.state_dict() if hasattr(c, 'state_dict') else "
    "next((c[k] for k in ('state_dict', 'model', 'model_state_dict') if k in c), c); torch.save(c, sys.argv[2])"
)
"""Converts a file with objects of other classes."""
_PLAIN = (
    Tensor,
    nn.Parameter,
    int,
    float,
    complex,
    str,
    bool,
    bytes,
    type(None),
    torch.Size,
    torch.dtype,
    torch.device,
)


def write(path: Path, checkpoint: Checkpoint, *, flush_folder: bool = True) -> None:
    """Write the checkpoint so that `path` is, at every moment, absent, the old file, or the whole new one.

    Args:
        path: the file.
        checkpoint: has passed `check_loadable`.
        flush_folder: False: the caller flushes the folder.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
        KeyboardInterrupt: a signal has interrupted it; nothing is left of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic.replacing(path, with_folder=flush_folder) as unfinished:
            try:
                torch.save(checkpoint, unfinished)  # given a file object, it would stop the other threads for long
            except RuntimeError:  # does not name the error of the system; this does, if it occurs again
                with unfinished.open("wb") as file:
                    torch.save(checkpoint, file)
    except (OSError, RuntimeError) as error:
        raise _cause(error, path) from error


def _cause(error: OSError | RuntimeError, path: Path) -> BaseException:
    """Return a signal's interrupt, or the system's error (a full disk) with the path.

    torch raises another error when it closes the file.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (OSError, KeyboardInterrupt)):
        cause = cause.__context__
    return OSError(cause.errno, cause.strerror, str(path)) if isinstance(cause, OSError) else cause or error


def load(
    path: Path,
    *,
    key: str = "resume",
    mmap: bool = False,
    ranks: Distributed = _ALONE,
    whole: bool = False,
    only: Collection[str] | None = None,
) -> Checkpoint:
    """Verify the checksums of a checkpoint, and load it to the CPU, tensors and plain values only.

    A `.safetensors` file becomes a checkpoint that has only a `state_dict`.

    Args:
        key: the option that named the file, for the error.
        mmap: read tensors from the file only when they are used.
        ranks: all ranks, each of which loads the file. Each verifies its share of it, and all raise the error of one.
            With a `mesh`, tensors in shards become DTensors, of which this rank reads its part; without one, they are
            gathered to whole tensors. By default, this process verifies the whole file.
        whole: whether tensors in shards become whole tensors also with a mesh.
        only: of a checkpoint in shards, the entries whose tensors are read; None: all. Empty: no tensor of the
            checkpoint is used, so its tensors are not verified.

    Raises:
        UserError: the file does not exist, is incomplete or damaged, needs pickle, or is not a checkpoint.
    """
    other = ", or a run directory" if key == "resume" else ""
    if not path.is_file():
        raise UserError(
            f"there is no checkpoint file {path}",
            key=key,
            remedy=missing_path(path, f"Name a file, outputs/…/checkpoints/epoch_20.pth{other}.", key),
        )
    if path.suffix == SAFETENSORS:
        _verify(path, key, ranks, tensors=only != ())
        return {"state_dict": _load_safetensors(path, key)}
    if not is_complete(path):
        raise UserError(
            f"{path} is not a complete checkpoint: it was cut off, is of torch before 1.6, or is not a checkpoint",
            key=key,
            remedy=_another(path, key),
        )
    if expands(path):
        raise UserError(f"{path} is damaged: its members are compressed", key=key, remedy=_another(path, key))
    _verify(path, key, ranks, tensors=only != ())
    checkpoint = _load_zip(path, key, mmap)
    if isinstance(checkpoint.get("shards"), str) and (of_file := shards_of(path)) is not None:
        del checkpoint["shards"]
        shards.read(checkpoint, of_file.folder, None if whole else ranks.mesh, only)
    return checkpoint


def _verify(path: Path, key: str, ranks: Distributed, *, tensors: bool) -> None:
    """Refuse a damaged file. Each rank verifies its share; without `tensors`, only the plain values."""
    damages = [
        one for one in ranks.gather(damage(path, ranks.rank, ranks.world_size, tensors=tensors)) if one is not None
    ]
    if damages:
        raise UserError(f"{path} is damaged: {damages[0]}", key=key, remedy=_another(path, key))


def _load_zip(path: Path, key: str, mmap: bool) -> Checkpoint:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except RuntimeError as error:  # a zip file that torch has not written
        raise UserError(f"{path} is not a checkpoint: {str(error).splitlines()[0]}", key=key) from error
    except (pickle.UnpicklingError, TypeError, ValueError) as error:
        found = re.search(r"GLOBAL (\S+)", str(error))  # the rest is advice to load it with pickle
        what = "" if found is None else f" ({found[1]})"
        new = path.with_stem(f"{path.stem}_converted")
        raise UserError(
            f"{path} contains more than tensors and plain values{what}, so it is not loaded",
            key=key,
            remedy=f"If you trust the file, whose code this runs, convert it once, and use {new.name}: "
            f'python -c "{_STATE_DICT_ALONE}" {shlex.quote(str(path))} {shlex.quote(str(new))}',
        ) from error
    if not isinstance(checkpoint, dict):
        raise UserError(f"{path} contains a {type(checkpoint).__name__}, not a checkpoint", key=key)
    return checkpoint


def _another(path: Path, key: str) -> str:
    """Return the remedy for a damaged file: the checkpoint before it."""
    before = intact_before(path)
    if before is None:
        return "Name another checkpoint, or copy this one again, with its folder of shards if it has one."
    named = key in ("resume", "load_from", "checkpoint", "init.checkpoint")
    return f"Use the checkpoint before it: {f'{key}={before}' if named else before}"


def _load_safetensors(path: Path, key: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(
            f"{path} is not a complete safetensors file: {error}",
            key=key,
            remedy="Copy or publish it again; name a file that torch.save has written .pth.",
        ) from error


class Position(NamedTuple):
    """The position of a run, as saved in a checkpoint."""

    progress: Progress
    skipped: int
    """Optimizer steps that fp16 skipped."""
    meta: Mapping[str, Any]
    """The entry `meta` of the checkpoint."""

    @property
    def given(self) -> Sequence[str]:
        """The keys of the parts that the run got as finished objects from Python."""
        found: Sequence[str] = self.meta.get("given", ())
        return found


def peek(path: Path, *, key: str) -> Position | None:
    """Return the position of a checkpoint's run without reading its tensors; None if the file is not of a run.

    Raises:
        UserError: as `load`.
    """
    checkpoint = load(path, key=key, mmap=True, only=())
    if "progress" not in checkpoint:
        return None
    progress = Progress()
    progress.load_state_dict(checkpoint["progress"])
    skipped = checkpoint.get("precision", {}).get("skipped", 0)
    return Position(progress, skipped, checkpoint.get("meta") or {})


def evaluation_weights(checkpoint: Checkpoint, weights: str = "averaged") -> dict[str, Tensor]:
    """Return the state dict to evaluate, publish or start from: averaged weights if there are any, otherwise raw ones.

    Args:
        checkpoint: as loaded; a bare state dict (name to tensor) is taken as raw weights.
        weights: `averaged` or `raw`.
    """
    if "state_dict" not in checkpoint:
        return checkpoint
    state: dict[str, Tensor] = dict(checkpoint["state_dict"])
    holder = (checkpoint.get("meta") or {}).get("averaged_weights")
    if holder is not None and weights == "averaged":
        state.update(checkpoint["hooks"][holder]["averaged"])
    return state


def check_resumable(checkpoint: Checkpoint, path: Path) -> None:
    """Refuse a file that has weights but not the rest of a run, and a published file, whose weights may be averages.

    Raises:
        UserError: names what is missing, or the checkpoint of the published file.
    """
    published_from = checkpoint.get("meta", {}).get("published_from")
    missing = [
        entry for entry in ("state_dict", "meta", "progress", "rng", "hooks", "precision") if entry not in checkpoint
    ]
    if published_from is not None or missing:
        problem = f"has no {', '.join(missing)}" if published_from is None else f"is published from {published_from}"
        raise UserError(
            f"{path} {problem}: a run cannot be resumed from it",
            key="resume",
            remedy=f"To start a new run from its weights, use load_from={path}.",
        )
    if checkpoint.get("format") != FORMAT:
        raise UserError(
            f"{path} has the checkpoint format {checkpoint.get('format')}, and this version reads {FORMAT}",
            key="resume",
        )


def check_loadable(value: Any, where: str) -> None:
    """Refuse, before it is written, what torch.load(weights_only=True) could not load later.

    Raises:
        UserError: names the entry.
    """
    if type(value) in (dict, OrderedDict, Counter):
        for name, item in value.items():
            check_loadable(name, f"the key {name!r} in {where}")
            check_loadable(item, f"{where}[{name!r}]")
    elif type(value) in (list, tuple, set):
        for index, item in enumerate(value):
            check_loadable(item, f"{where}[{index}]")
    elif type(value) not in _PLAIN:
        raise UserError(
            f"it is a {type(value).__module__}.{type(value).__qualname__}, which cannot be loaded without pickle",
            key=where,
            remedy="Return tensors, numbers, strings, lists and dicts in state_dict().",
        )

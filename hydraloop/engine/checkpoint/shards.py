"""Shards: with FSDP2, each rank writes its part of each sharded tensor to a safetensors file, without pickle.

`epoch_5.pth` of rank 0 is written last and has everything else. In it, `{"__shard__": name}` stands for a sharded
tensor, and the entry `shards` lists the files in the folder `epoch_5.shards-…` next to it (see `integrity.Shards`). The
files are those of torch.distributed.checkpoint's `HuggingFaceStorageWriter`, which other programs can read, too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hydraloop.engine.distributed.fsdp import is_sharded
from hydraloop.files import atomic
from hydraloop.files.integrity import SHARDS, Shards, crc32_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Parts = dict[str, tuple[Tensor, torch.Size]]
"""By name: this rank's part of a tensor, and the shape of the whole tensor."""
_STAND_IN = "__shard__"


def with_replaced(value: Any, replace: Callable[[Any, str], Any], path: str = "") -> Any:
    """Return a copy of the containers, in which other values are replaced; what is replaced is not searched.

    Args:
        replace: called with each value and its path (`optimizer/state/0`); returns the same value to keep it.
    """
    new = replace(value, path)
    if new is not value:
        return new
    if isinstance(value, dict):
        items = copy(value)  # with the attributes of an OrderedDict: `_metadata` of a state dict
        for name, item in value.items():
            items[name] = with_replaced(item, replace, f"{path}/{name}" if path else str(name))
        return items
    if type(value) in (list, tuple):
        return type(value)(with_replaced(item, replace, f"{path}/{number}") for number, item in enumerate(value))
    return value


def split(checkpoint: Any, parts: Parts) -> Any:
    """Return a nested value with a stand-in for each sharded tensor, and add this rank's parts to `parts`.

    Called on every rank. A DTensor that is not split along its first dimension is gathered instead.
    """

    def replace(value: Any, path: str) -> Any:
        if not is_sharded(value):
            return value
        from torch.distributed.tensor import Shard

        part = value.to_local().detach()
        if value.placements != (Shard(0),) or type(part) is not Tensor:
            return value.full_tensor().cpu()
        while path in parts:  # the keys 3 and "3"
            path += "'"
        parts[path] = part, value.shape
        return {_STAND_IN: path}

    return with_replaced(checkpoint, replace)


def join(checkpoint: Any, tensor: Callable[[str], Tensor | None]) -> Any:
    """Return a nested value with tensors in place of their stand-ins; a stand-in without a tensor stays."""

    def replace(value: Any, path: str) -> Any:
        if not isinstance(value, dict) or value.keys() != {_STAND_IN}:
            return value
        loaded = tensor(value[_STAND_IN])
        return value if loaded is None else loaded

    return with_replaced(checkpoint, replace)


def write(path: Path, parts: Parts, mesh: DeviceMesh) -> Shards:
    """Write the parts of all ranks to a new folder next to `path`; called on every rank, maybe in a thread.

    Args:
        path: the `.pth` file that the shards belong to.
        mesh: of the hosts, for this purpose only.

    Returns:
        What the `.pth` lists.

    Raises:
        OSError: a rank could not write; raised on every rank, and the folder is removed.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.tensor import DTensor, Shard

    group, rank = mesh.get_group(), mesh.get_rank()
    token = [os.urandom(4).hex()]
    dist.broadcast_object_list(token, 0, group=group)
    # A new name, so that the shards of an earlier file of this name stay complete until the new file is.
    folder = path.with_name(f"{path.stem}{SHARDS}{token[0]}")
    sharded = {}
    for name, part in apart({name: part.cpu() for name, (part, _) in parts.items()}).items():
        like = torch.empty(parts[name][1], device="meta")
        sharded[name] = DTensor.from_local(
            part, mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
        )
    files_here: dict[str, list[int]] = {}
    error_here: BaseException | None = None
    try:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(sharded, storage_writer=writer, process_group=group)
        files = sorted(folder.glob(f"shard-{rank + 1:05d}-*"))
        files_here = {file.name: [crc32_of(file), file.stat().st_size] for file in files}
    except CheckpointException as error:  # on every rank
        error_here = next((one for one, _ in error.failures.values() if isinstance(one, OSError)), error)
    except OSError as error:
        error_here = error
    of_ranks: list[Any] = [None] * mesh.size()  # the files of each rank, or the number of its error
    here = files_here if error_here is None else getattr(error_here, "errno", None)
    dist.all_gather_object(of_ranks, here, group=group)
    failed = [of_rank for of_rank in of_ranks if not isinstance(of_rank, dict)]
    if failed:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        if failed[0] is None:
            raise RuntimeError(f"the shards of {path.name} could not be written: {error_here}")
        raise OSError(failed[0], os.strerror(failed[0]), str(folder))
    if rank == 0:
        atomic.flush_folder(folder)
    return Shards(folder, {name: entry for of_rank in of_ranks for name, entry in of_rank.items()})


def link(shards: Shards, path: Path) -> Shards:
    """Give the shards of a checkpoint a second folder, next to `path`, with hard links or copies; called on rank 0."""
    folder = path.with_name(f"{path.stem}{SHARDS}{shards.folder.name.rpartition(SHARDS)[2]}")
    folder.mkdir(exist_ok=True)
    for name in shards.files:
        atomic.link(shards.folder / name, folder / name)
    return Shards(folder, shards.files)


def read(checkpoint: dict[str, Any], folder: Path, mesh: DeviceMesh | None, only: Collection[str] | None) -> None:
    """Put the tensors in place of their stand-ins; needs no communication.

    Args:
        checkpoint: changed in place.
        folder: of the shards.
        mesh: of the hosts: each tensor is a DTensor on the CPU, of which this rank reads its part. None: whole tensors.
        only: the entries of the checkpoint whose tensors are needed; None: all.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    needed = {entry: value for entry, value in checkpoint.items() if only is None or entry in only}
    names: set[str] = set()
    join(needed, names.add)
    if not names:
        return
    # torch's `load` would warn that it communicates with no other rank.
    reader, planner = HuggingFaceStorageReader(str(folder)), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    tensors: dict[str, Any] = {}
    for name in names:
        facts: Any = metadata.state_dict_metadata[name]
        tensors[name] = _empty(facts.size, facts.properties.dtype, mesh)
    planner.set_up_planner(tensors, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
    checkpoint.update(join(needed, tensors.get))


def _empty(shape: torch.Size, dtype: torch.dtype, mesh: DeviceMesh | None) -> Tensor:
    if mesh is None:
        return torch.empty(shape, dtype=dtype)
    from torch.distributed.tensor import Shard, empty

    return empty(shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])


def apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in separate memory: safetensors rejects shared memory, and strict loading needs every name."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        found[name] = value
        if value.layout is torch.strided:  # safetensors rejects the others
            storage = value.untyped_storage().data_ptr()
            found[name] = value.clone(memory_format=torch.contiguous_format) if storage in seen else value.contiguous()
            seen.add(storage)
    return found

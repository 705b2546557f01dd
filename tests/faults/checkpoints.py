"""What loading does with damaged checkpoint files: random damage of each kind, and each bit of a zip's headers.

    python -m tests.faults.checkpoints [cases] [seed]

Prints a Markdown table. A damage is *reported* if loading raises a `UserError`, and *harmless* if all values equal
those of the undamaged file to the last bit, because the damage is in bytes that no reader uses. *Loaded wrong* must not
happen. The last column counts the files that the library alone (torch.load, safetensors) loads without an error, with
other values. Of a checkpoint in shards, which two ranks write, the shard of rank 1 is damaged.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from hydraloop.engine.checkpoint.format import load, write
from hydraloop.engine.distributed.process_group import connect
from hydraloop.engine.save_and_restore import part_of_this_rank, write_file
from hydraloop.errors import UserError
from hydraloop.hooks.checkpoint_copies import write_safetensors
from hydraloop.schemas.engine import DistributedConf
from tests.faults import tables
from tests.faults.comparison import compared

RANDOM = ("a flipped bit", "a cut-off end", "a page of zeros")
HEADERS = "each bit of the zip's headers"
PAGE = 512


SHARD = "shard"
"""The format of FSDP2: one file of each rank."""


def put_shard(rank: int, path: Path, port: int, state: dict[str, Tensor]) -> None:
    """Write the shards of two ranks, and rank 0's file."""
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="localhost")
    os.environ.update(MASTER_PORT=str(port), LOCAL_WORLD_SIZE="2")
    distributed = connect(DistributedConf(strategy="fsdp2"), "cpu")
    assert distributed.mesh is not None
    sharded = {name: distribute_tensor(value, distributed.mesh, [Shard(0)]) for name, value in state.items()}
    checkpoint = part_of_this_rank({"state_dict": sharded, "meta": {"epoch": 2}}, distributed)
    assert write_file(path, checkpoint, distributed, resume_from_it=False, delete=())
    distributed.close()


def put(folder: Path, suffix: str) -> Path:
    """Write a small checkpoint."""
    draw = torch.Generator().manual_seed(0)
    weights = {"weight": torch.randn(40, 9, generator=draw), "bias": torch.arange(300.0), "empty": torch.empty(0)}
    average = {"exp_avg": torch.randn(40, 9, generator=draw), "step": torch.tensor(7)}
    path = folder / f"epoch_2{'.pth' if suffix == SHARD else suffix}"
    if suffix == SHARD:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(put_shard, (path, port, weights), nprocs=2)
    elif suffix == ".safetensors":
        write_safetensors(path, weights, {"name": "a run", "lr": [0.1, 0.2]}, like=folder)
    else:
        write(path, {"state_dict": weights, "optimizer": {"state": {0: average}}, "meta": {"epoch": 2, "lr": 0.1}})
    return path


def damaged(content: bytes, kind: str, draw: random.Random) -> bytes:
    """Return the content with random damage."""
    changed, at = bytearray(content), draw.randrange(len(content))
    if kind == RANDOM[0]:
        changed[at] ^= 1 << draw.randrange(8)
    elif kind == RANDOM[1]:
        del changed[at:]
    else:
        page = slice(at // PAGE * PAGE, (at // PAGE + 1) * PAGE)
        changed[page] = bytes(len(changed[page]))
    return bytes(changed)


def in_headers(content: bytes) -> Iterator[bytes]:
    """Yield the content with each bit flipped of local headers and of the table of contents at the end."""
    table = content.index(b"PK\1\2")
    places: set[int] = set(range(table, len(content)))
    at = content.find(b"PK\3\4")
    while at >= 0:
        places.update(range(at, at + 30))
        at = content.find(b"PK\3\4", at + 1)
    for at in sorted(places):
        for bit in range(8):
            changed = bytearray(content)
            changed[at] ^= 1 << bit
            yield bytes(changed)


def outcome(read: Callable[[Path], Any], path: Path, expected: Any, raised: type[Exception]) -> str:
    """Return what loading a file gives: reported, harmless or wrong."""
    try:
        return "wrong" if list(compared("", read(path), expected)) else "harmless"
    except raised:
        return "reported"


def measure(folder: Path, suffix: str, kind: str, cases: int, seed: int) -> Counter[str]:
    """Damage a file, and count the outcomes of loading it."""
    path, draw = put(folder, suffix), random.Random(seed)
    target = next(folder.glob("*/shard-00002-*")) if suffix == SHARD else path
    whole = target.read_bytes()
    alone: Callable[[Path], Any] = torch.load if suffix == ".pth" else load_file
    expected, expected_alone = deepcopy((load(path), alone(target)))  # safetensors maps the file into memory
    contents = in_headers(whole) if kind == HEADERS else (damaged(whole, kind, draw) for _ in range(cases))
    found: Counter[str] = Counter()
    for content in contents:
        target.write_bytes(content)
        found[outcome(load, path, expected, UserError)] += 1
        found["alone"] += outcome(alone, target, expected_alone, Exception) == "wrong"
        found["cases"] += 1
    return found


def main(cases: int = 1000, seed: int = 1) -> None:
    """Print the table."""
    tables.head("format", "damage", "cases", "reported", "harmless", "loaded wrong", "the library alone, wrong")
    for suffix in (".pth", ".safetensors", SHARD):
        for kind in (*RANDOM, *([HEADERS] if suffix == ".pth" else [])):
            with tempfile.TemporaryDirectory() as folder:
                found = measure(Path(folder), suffix, kind, cases, seed)
            columns = [found[name] for name in ("cases", "reported", "harmless", "wrong", "alone")]
            name = suffix if suffix == SHARD else f"`{suffix}`"
            tables.row(name, kind, *(f"{count:,}" for count in columns))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

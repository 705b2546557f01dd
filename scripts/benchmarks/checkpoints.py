"""Cost of checkpoints: 25 million parameters with AdamW's state (300 MB), compared with a copy and with torch.save.

    python scripts/benchmarks/checkpoints.py [--rounds 15] [--threads 2]

* stall: how long training waits for an asynchronous save, compared with `copy_` of the same tensors to kept buffers;
* synchronous: the weights are checked, and the file is written, flushed and renamed, compared with `torch.save` and
  `os.fsync`;
* check: the part of it that looks for NaN and infinity in the weights. In an asynchronous save, the thread does it;
* newest: `newest_intact` of a folder with 100 checkpoints of 300 KB;
* idle: the hook's call in an iteration in which nothing is saved, with `by_epoch=false`. By epoch, there is no call.

Each round measures everything once. A figure is the median over the rounds, with minimum and maximum. Ratios are
computed for each round. The first round, which allocates the buffers, is left out.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from measure import parser, row, spread, table

from hydraloop.engine.checkpoint.saver import Saver, broken_weights, write_file
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.progress import Progress
from hydraloop.files.checkpoint_files import newest_intact
from hydraloop.hooks.checkpoint import CheckpointHook

_CALLS = 10_000


def main() -> None:
    """Print the table."""
    arguments = parser(__doc__, rounds=15, threads=2).parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments.rounds + 1)
    table("", "median (min to max)")
    for name, values in found.items():
        row(name, spread(values[1:]))


def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return times in milliseconds, and ratios, of every round."""
    parts = [{f"{part}.{number}": torch.randn(160_000) for number in range(160)} for part in ("weight", "m", "v")]
    checkpoint: dict[str, Any] = {"state_dict": parts[0], "optimizer": parts[1:]}
    tensors = [value for part in parts for value in part.values()]
    buffers = [torch.empty_like(value) for value in tensors]
    many = folder / "many"
    many.mkdir()
    for number in range(100):
        path = many / f"epoch_{number}.pth"
        write_file(path, {"w": torch.randn(75_000)}, Distributed(), resume_from_it=True, delete=())
    saver = Saver(Distributed(), lambda: None)
    hook = CheckpointHook(by_epoch=False, interval=1000)
    engine: Any = SimpleNamespace(progress=Progress(iteration=1), max_iters=100_000)

    def copy() -> None:
        for buffer, value in zip(buffers, tensors, strict=True):
            buffer.copy_(value)

    def check(saved: dict[str, Any]) -> None:
        if broken_weights(saved, (), None, Distributed()):
            raise RuntimeError("the weights are finite")

    def write(saved: dict[str, Any]) -> bool:
        check(saved)
        return write_file(folder / "ours.pth", saved, Distributed(), resume_from_it=True, delete=())

    def plain_save() -> None:
        with (folder / "torchs.pth").open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())

    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        copied = timed(copy)
        stall = timed(lambda: saver.start(checkpoint, write, lambda written: None, asynchronous=True))
        saver.wait()
        plain, ours = timed(plain_save), timed(lambda: write(checkpoint))
        checked = timed(lambda: check(checkpoint))
        newest = timed(lambda: newest_intact(many))
        idle = timed(lambda: [hook.after_train_iter(engine, 0, None, {}) for _ in range(_CALLS)])
        for name, value in {
            "copy [ms]": copied, "stall [ms]": stall, "stall / copy": stall / copied,
            "torch.save and fsync [ms]": plain, "synchronous [ms]": ours, "synchronous / torch.save": ours / plain,
            "check [ms]": checked, "check / synchronous": checked / ours,
            "newest of 100 [ms]": newest, "idle [µs]": idle / _CALLS * 1000,
        }.items():  # fmt: skip
            found.setdefault(name, []).append(value)
    return found


def timed(act: Callable[[], object]) -> float:
    """Return the time of a call in milliseconds."""
    start = perf_counter()
    act()
    return (perf_counter() - start) * 1000


if __name__ == "__main__":
    main()

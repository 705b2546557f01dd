"""The checkpoint hook's records of its files: the best ones, the regular ones, and those to delete."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.hooks.checkpoint.out_dir import CheckpointFolder


@dataclass(frozen=True, slots=True)
class BestFile:
    """The best validation of one metric."""

    value: float
    iteration: int
    path: Path


@dataclass(frozen=True, slots=True)
class FileRecords:
    """The files of a run. A change returns new records, so that a failed write can restore the previous ones."""

    best: Mapping[str, BestFile] = field(default_factory=dict)
    """By metric."""
    kept: tuple[Path, ...] = ()
    """Regular files, oldest first, without those deleted by `max_keep_ckpts`."""
    replaced: tuple[Path, ...] = ()
    """Best files that a better one has replaced, to be deleted."""
    last_saved: int = 0
    """The iteration of the newest regular file."""

    def with_regular(self, path: Path, iteration: int) -> FileRecords:
        """Add a regular file, the newest."""
        kept = (*(other for other in self.kept if other != path), path)
        return replace(self, kept=kept, last_saved=iteration)

    def with_best(self, better: Mapping[str, BestFile]) -> FileRecords:
        """Replace the best files of some metrics."""
        before = tuple(self.best[name].path for name in better if name in self.best)
        return replace(self, best={**self.best, **better}, replaced=(*self.replaced, *before))

    def as_main_finds_them(self, distributed: Distributed) -> tuple[FileRecords, dict[str, BestFile]]:
        """Return the records with the best files that exist on rank 0, and the missing ones; equal on all ranks."""
        found = {
            name: [best.path.is_file(), best.value, best.iteration, str(best.path)] for name, best in self.best.items()
        }
        on_main: dict[str, list[Any]] = distributed.from_main(found)
        best = {name: BestFile(value, at, Path(path)) for name, (_, value, at, path) in on_main.items()}
        existing = {name: file for name, file in best.items() if on_main[name][0]}
        missing = {name: file for name, file in best.items() if name not in existing}
        return replace(self, best=existing), missing

    def state(self, folder: CheckpointFolder) -> dict[str, Any]:
        """Return plain values, with paths as the folder names them."""
        return {
            "best": {
                name: {"value": best.value, "iteration": best.iteration, "checkpoint": folder.relative(best.path)}
                for name, best in self.best.items()
            },
            "kept": [folder.relative(path) for path in self.kept],
            "replaced": [folder.relative(path) for path in self.replaced],
            "last_saved": self.last_saved,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any], folder: CheckpointFolder, names: Collection[str]) -> FileRecords:
        """Restore records from a `state`, with the best files of these metrics, even if the files do not exist."""
        return cls(
            best={
                name: BestFile(entry["value"], entry["iteration"], folder.locate(entry["checkpoint"]))
                for name, entry in state["best"].items()
                if name in names
            },
            kept=tuple(folder.locate(name) for name in state["kept"]),
            replaced=tuple(folder.locate(name) for name in state["replaced"]),
            last_saved=state["last_saved"],
        )

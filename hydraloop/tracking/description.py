"""What trackers are told of a run, on disk: `tracking/run.json`, and `attempt_<n>.json` for each process's part of it.

Written by the training process, read by followers and by `sync.py`. Secrets are masked before anything is written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hydraloop.run import atomic
from hydraloop.run.config_yaml import plain
from hydraloop.run.result import FILENAME as RESULT_FILE
from hydraloop.safety.secrets import mask_text
from hydraloop.tracking.follower.locks import FOLDER
from hydraloop.tracking.tracker import Attempt, Finish, Run, Sweep

_RUN, _ATTEMPT, SWEEP_FILE = "run.json", "attempt_{}.json", "sweep.json"
_UP = 4
"""How far above a job's directory its sweep's may be: `hydra.sweep.subdir` may have several parts."""
EXIT_CODES = {"finished": 0, "stopped": 0, "failed": 1, "interrupted": 130, "killed": 137}


def write(run: Run) -> None:
    """Write a run with its attempts; the run last: whoever finds it finds them."""
    folder = run.run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    for attempt in run.attempts:
        _put(folder / _ATTEMPT.format(attempt.number), asdict(attempt))
    _put(folder / _RUN, {"uid": run.uid, "experiment": run.experiment, "name": run.name})


def read(run_dir: Path) -> Run | None:
    """The run in a directory; None where it has not been described."""
    run_dir = run_dir.absolute()
    folder = run_dir / FOLDER
    try:
        found = json.loads((folder / _RUN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    attempts = tuple(_attempts(folder))
    if not attempts:
        return None
    return Run(run_dir=run_dir, attempts=attempts, sweep=sweep_of(run_dir), **found)


def with_attempt(run: Run | None, new: Run) -> Run:
    """The described run as it goes on: with the attempt of `new` as the next one; `new` where there is none yet."""
    if run is None:
        return new
    return replace(run, attempts=(*run.attempts, replace(new.attempt, number=run.attempt.number + 1)))


def sweep_of(run_dir: Path) -> Sweep | None:
    """The sweep that a run directory is a job's of; None where it is none's.

    Where Hydra has recorded what the directory is, that counts: a run of its own may lie in a sweep's directory.
    """
    run_dir = run_dir.absolute()
    recorded = _recorded(run_dir)
    if recorded is not None and recorded.depth == 0:
        return None
    for depth, folder in enumerate(list(run_dir.parents)[:_UP], start=1):
        found = read_sweep(folder) if recorded is None or recorded.depth == depth else None
        if found is not None:
            return replace(found, job=_named(run_dir) if recorded is None else recorded.job)
    return None


def write_sweep(sweep: Sweep) -> None:
    """Say that a directory is a sweep's; jobs find it by looking up."""
    folder = sweep.folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    _put(folder / SWEEP_FILE, {"uid": sweep.uid, "name": sweep.name, "axes": sweep.axes})


def read_sweep(folder: Path) -> Sweep | None:
    """The sweep in a directory, for whatever job; None where the directory is none's."""
    try:
        found = json.loads((folder / FOLDER / SWEEP_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Sweep(folder.absolute(), found["uid"], found["name"], job=0, axes=tuple(found["axes"]))


def ending(run_dir: Path, attempt: Attempt) -> Finish:
    """How an attempt whose process is gone has ended: as `result.json` says, if it is this attempt's; else killed.

    It is this attempt's where it is not the one that was there when it began: true in a copy, and for any clock.
    """
    try:
        content = (run_dir / RESULT_FILE).read_bytes()
        if _digest(content) != attempt.earlier_result:
            result = json.loads(content)
            return finish_of(result["status"], result.get("error"))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return finish_of("killed", None)


def result_digest(run_dir: Path) -> str | None:
    """What tells one `result.json` from another; None where there is none."""
    try:
        return _digest((run_dir / RESULT_FILE).read_bytes())
    except OSError:
        return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def finish_of(status: Any, error: str | None) -> Finish:
    """A status of `result.json`, or `killed`, as trackers are told it."""
    return Finish(status, None if error is None else mask_text(error), EXIT_CODES[status])


def flattened(node: Any, prefix: str = "") -> dict[str, str | int | float | bool | None]:
    """A plain config with dotted names: `{"a": {"b": [1]}}` is `{"a.b.0": 1}`; empty ones as `{}` and `[]`.

    NaN and infinity become text: JSON has none.
    """
    return dict(_leaves(node, prefix))


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, str | int | float | bool | None]]:
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list | tuple) else None
    if items is None or not node:
        empty = "{}" if isinstance(node, Mapping) else "[]"
        yield prefix, empty if items is not None else _scalar(node)
        return
    for name, item in items:
        yield from _leaves(item, f"{prefix}.{name}" if prefix else str(name))


def _scalar(value: Any) -> str | int | float | bool | None:
    value = plain(value)
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _attempts(folder: Path) -> Iterator[Attempt]:
    number = 0
    while (path := folder / _ATTEMPT.format(number)).exists():
        yield Attempt(**json.loads(path.read_text(encoding="utf-8")))
        number += 1


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What Hydra has recorded of a run directory."""

    depth: int
    """How far below its sweep's directory it is; 0 for a run of its own."""
    job: int
    """Its number in the sweep."""


def _recorded(run_dir: Path) -> _Recorded | None:
    """None where nothing is recorded (a run started from Python) that can be understood."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        hydra = OmegaConf.load(run_dir / ".hydra" / "hydra.yaml").hydra
        if "MULTIRUN" not in str(hydra.mode):
            return _Recorded(0, 0)
        sweep = Path(hydra.runtime.cwd, hydra.sweep.dir)
        inside = Path(hydra.runtime.output_dir).relative_to(sweep)  # the same wherever the sweep has been moved to
        return _Recorded(len(inside.parts), int(hydra.job.num))
    except (OSError, AttributeError, TypeError, ValueError, OmegaConfBaseException, YAMLError):
        return None


def _named(run_dir: Path) -> int:
    """A job's number by its directory's name."""
    return int(run_dir.name) if run_dir.name.isdigit() else 0


def _put(path: Path, content: Mapping[str, Any]) -> None:
    atomic.write_text(path, json.dumps(content, indent=1) + "\n")

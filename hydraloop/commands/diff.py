"""`python -m hydraloop diff`: what differs between two runs. Imports torch only for a run without `result.json`."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydraloop import json_answers
from hydraloop.errors import printable
from hydraloop.run_files import changes, code_patch, record_log
from hydraloop.run_files.checkpoint_files import newest_intact
from hydraloop.run_files.config_yaml import loaded, plain
from hydraloop.run_files.result import Result
from hydraloop.run_files.run_directory import check_holds_run, checkpoint_folders, config_file

_RESULTS = ("status", "error", "reason", "best", "progress", "val_metrics", "test_metrics")
_TIMES = ("perf/", "/time", "/data_time", "/samples_per_second")
"""Parts of the names of values that describe the speed."""
_MOST = 3
"""Values of a record that are shown."""


def run(args: argparse.Namespace) -> int:
    """Print the differences. Returns the exit code, as diff(1): 0 nothing differs, 1 something does.

    Raises:
        UserError: see `compare`.
    """
    sections = compare(*args.directory)
    if args.json:
        json_answers.write("diff", {"directories": args.directory, "differences": sections})
        return int(any(sections.values()))
    for name, lines in sections.items():
        for number, line in enumerate(lines):
            print(printable(f"{'' if number else name:<10}{line}"))
    if not any(sections.values()):
        print(f"no differences: {', '.join(sections)}")
    return int(any(sections.values()))


def compare(a: Path, b: Path) -> dict[str, list[str]]:
    """Return the differences of two runs as lines, by section.

    Raises:
        UserError: a directory has no run, or a config that cannot be read.
    """
    for run_dir in (a, b):
        check_holds_run(run_dir)
    (old, before), (new, after) = map(_outcome, (a, b))
    return {
        "config": [str(one) for one in changes.differences(*_configs(a, b)) if one.key != "resume"],
        "code": [*changes.code(old.get("git") or {}, new.get("git") or {}), *_patched(a, b)],
        "packages": changes.packages(old, new),
        "results": [str(one) for name in before if name in after for one in _between(name, before, after)],
        "records": _first_record(a, b),
    }


def _outcome(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entries `git` and `versions` of a run, and its results. A killed run has them in its checkpoint."""
    result = Result.read(run_dir)
    if result is None:
        last = newest_intact(*checkpoint_folders(run_dir))
        if last is None:
            return {}, {"status": "killed"}
        from hydraloop.engine.checkpoint.format import load  # imports torch

        saved = load(last, mmap=True, only=())
        meta = saved.get("meta") or {}
        return meta, {"status": "killed", "progress": saved.get("progress"), "val_metrics": meta.get("metrics")}
    found = cast(dict[str, Any], plain(asdict(result)))
    if found["best"]:
        del found["best"]["checkpoint"]  # a path in the run
    return found, {name: found[name] for name in _RESULTS}


def _between(name: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[changes.Change]:
    return changes.differences(before[name], after[name], name)


def _configs(*run_dirs: Path) -> list[Any]:
    """Return the configs, resolved if each of them resolves here."""
    configs = [OmegaConf.create() if file is None else loaded(file, file) for file in map(config_file, run_dirs)]
    try:
        return [plain(cfg) for cfg in configs]
    except OmegaConfBaseException:
        return [OmegaConf.to_container(cfg, resolve=False) for cfg in configs]


def _patched(a: Path, b: Path) -> list[str]:
    """Return a line that names the first file whose uncommitted changes differ."""
    old, new = map(_by_file, (a, b))
    first = next((name for name in sorted({**old, **new}) if old.get(name) != new.get(name)), None)
    return [] if first is None else [f"code: the uncommitted changes of {first} differ"]


def _by_file(run_dir: Path) -> dict[str, str]:
    """Return the parts of a run's `code.patch` by the name of the file."""
    patch = code_patch.find(run_dir)
    text = "" if patch is None else patch.read_text(encoding="utf-8", errors="replace")
    parts = re.split(r"(?m)^diff --git ", text)[1:]
    return {part.splitlines()[0].rpartition(" b/")[2]: part for part in parts}


def _first_record(a: Path, b: Path) -> list[str]:
    """Return a line about the first record that differs: values other than times, or a record that one run lacks."""
    old, new = (dict(records(run_dir)) for run_dir in (a, b))
    for key in sorted({**old, **new}):
        iteration, mode, _ = key
        where = f"first at iteration {iteration}, mode {mode}: "
        if key not in old or key not in new:
            return [f"{where}only {a if key in old else b} has this record"]
        lines = [described(change) for change in changes.differences(old[key], new[key])]
        if lines:
            more = f", and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
            return [where + ", ".join(lines[:_MOST]) + more]
    return []


def records(run_dir: Path) -> Iterator[tuple[tuple[int, str, int], dict[str, float | str]]]:
    """Yield the values of each record, with its iteration, its mode and how many such records are before it."""
    seen: Counter[tuple[int, str]] = Counter()
    for record in record_log.read_all(run_dir / record_log.FILENAME):
        at = record.iteration, record.mode
        numbers = {name: value for name, value in record.metrics.items() if not _is_time(name)}
        # NaN does not equal itself; its text does.
        yield (
            (*at, seen[at]),
            {**{name: value if value == value else "nan" for name, value in numbers.items()}, **record.texts},
        )
        seen[at] += 1


def _is_time(name: str) -> bool:
    return name.startswith(_TIMES[0]) or name.endswith(_TIMES[1:])


def described(change: changes.Change) -> str:
    """Return a change with its size, if both values are numbers."""
    old, new = change.old, change.new
    return f"{change} ({new - old:+.3g})" if isinstance(old, float) and isinstance(new, float) else str(change)

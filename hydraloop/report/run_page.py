"""The page of a run, and the parts of it that other pages have too."""

from __future__ import annotations

import base64
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydraloop.engine.report.formats import clock, duration, number
from hydraloop.errors import UserError
from hydraloop.report.curves import MOST, charts, layout_of
from hydraloop.report.markup import Html, element, facts, note, section, table, tree
from hydraloop.report.page import Page
from hydraloop.report.run_data import RunData
from hydraloop.run_files.checkpoint_files import candidates
from hydraloop.run_files.environment import shown
from hydraloop.run_files.run_directory import checkpoint_folders
from hydraloop.validate.hooks import slots_of

_PICTURES, _BYTES = 12, 4_000_000
"""Pictures of one name, and the bytes of all pictures. The page leaves others out, and says so."""
_HOOKS = 10
"""Hooks whose time is shown, the most expensive ones."""
_ROWS, _LINES = 100, 30
"""Rows of a table that a hook has logged, and lines at the end of a log."""
_FORMATS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg"}


def write(run: RunData, output: Path) -> None:
    """Write the page of a run. Errors: as of `Page.write`."""
    page = Page(f"{run.name} - hydraloop")
    page.write(
        output,
        head(run.name, run.status, " ".join(run.typed), facts(summary(run))),
        *_problem(run),
        section("Curves", *figures(page, {"": run.curves}, *_time_by_part(page, run))),
        section("Pictures, tables and texts", *_objects(run)),
        section("Config", _config(run)),
        section("Hooks", _hooks(run)),
        section("Checkpoints", _checkpoints(run), is_open=False),
        section("Versions", _versions(run), is_open=False),
    )


def head(name: str, status: str, typed: str, *more: Html) -> Html:
    """Return the head of the page of a run or a sweep."""
    return element("header", element("h1", name), badge(status), element("p", element("code", typed)), *more)


def badge(status: str) -> Html:
    """Return a status as a colored word."""
    return element("span", status, class_=f"badge {status}")


def summary(run: RunData) -> dict[str, object]:
    """Return the facts about a run by name."""
    found: dict[str, object] = {}
    result = run.result
    if result is not None and result.objective is not None:
        goal = result.objective
        found[f"{goal.metric}, {'best' if result.best else 'last'}"] = number(goal.value)
    if result is not None:
        found |= {f"test {name}": number(value) for name, value in result.test_metrics.items()}
    last = run.records[-1] if run.records else None
    found |= {"epoch": last and last.epoch, "iterations": last and last.iteration}
    if result is not None:
        found["time"] = duration(result.seconds)
    elif "perf/eta" in run.curves and run.status == "running":
        found["time left"] = f"about {clock(float(run.curves['perf/eta'].values[-1]))}"
    return found


def figures(page: Page, runs: Mapping[str, Mapping[str, Any]], *more: Html) -> Iterator[Html]:
    """Yield the charts of runs, and more. Arguments: as of `charts`."""
    found = list(charts(runs))
    plots = [page.figure(title, traces, layout_of(traces)) for title, traces in found[:MOST]]
    if plots or more:
        yield element("div", *plots, *more, class_="grid")
    else:
        yield note("There are no records.")
    if len(found) > MOST:
        yield note(f"Left out: {', '.join(title for title, _ in found[MOST:])}")


def _time_by_part(page: Page, run: RunData) -> Iterator[Html]:
    """Yield the chart of the time of an iteration, and that of the time in hooks."""
    time, data = run.curves.get("perf/time"), run.curves.get("perf/data_time")
    if time is not None and data is not None and len(time.values) == len(data.values):
        parts = {"waiting for data": data.values, "the rest": time.values - data.values}
        traces = [
            {"x": time.iterations, "y": 1000 * values, "name": name, "stackgroup": "time", "line": {"width": 1}}
            for name, values in parts.items()
        ]
        yield page.figure("Time of an iteration [ms]", traces, layout_of(traces))
    hooks = {} if run.result is None else run.result.hook_seconds
    names = sorted(filter(hooks.get, hooks), key=hooks.__getitem__)[-_HOOKS:]
    if run.result is not None and names:
        bars = {"type": "bar", "orientation": "h", "y": names, "x": [hooks[name] for name in names]}
        yield page.figure(f"Time in hooks [s], of {duration(run.result.seconds)} in all", [bars])


def _problem(run: RunData) -> Iterator[Html]:
    """Yield why a run has no result, or not a good one."""
    result = run.result
    if run.status == "running":
        yield note("This run has not ended. The page shows its records until now.")
    elif result is None:
        yield note("The run has no result.json: its process was killed, or it has not begun.")
    elif result.error or result.reason:
        yield section("Error" if result.error else "Reason", element("pre", result.error or result.reason))
    if run.status in ("failed", "killed") and (log := run.file("train.log")) is not None:
        yield section("The end of the log", element("pre", end_of(log)))


def end_of(log: Path, lines: int = _LINES) -> str:
    """Return the last lines of a log, without colors; nothing if there is no log."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 200 * lines))
        text = file.read().decode("utf-8", "replace")
    return "\n".join(re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()[-lines:])


def _objects(run: RunData) -> Iterator[Html]:
    """Yield what hooks have logged."""
    named: defaultdict[str, list[tuple[int, str, str]]] = defaultdict(list)
    for record, one in run.objects:
        named[one.name].append((record.iteration, one.kind, one.path))
    left, others = _BYTES, []
    for name, found in named.items():
        kind = found[-1][1]
        if kind == "image":
            pictures, left = _pictures(run, [(at, path) for at, _, path in found], left)
            yield element("figure", element("figcaption", name), pictures)
        elif kind in ("table", "text") and (file := run.file(found[-1][2])) is not None:
            yield element("figure", element("figcaption", f"{name}, iteration {found[-1][0]:,}"), _text(file, kind))
        else:
            others.append(f"{name} ({kind}): {shown(run.path / found[-1][2])}")
    if others:
        yield note(f"Not shown: {'; '.join(others)}")


def _pictures(run: RunData, found: list[tuple[int, str]], left: int) -> tuple[Html, int]:
    """Return the pictures of one name, the last one visible, and how many bytes are left for other pictures."""
    chosen = found[:: -(-len(found) // _PICTURES)]
    images = []
    for iteration, path in reversed([*chosen, *(found[-1:] if chosen[-1] != found[-1] else [])]):
        content = b"" if (file := run.file(path)) is None else file.read_bytes()
        kind = next((kind for start, kind in _FORMATS.items() if content.startswith(start)), None)
        if kind is not None and len(content) <= left:
            left -= len(content)
            source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
            images.append(element("img", src=source, alt=path, title=f"iteration {iteration:,}"))
    text = f"{len(images)} of {len(found)} pictures" if len(images) < len(found) else ""
    slider = f'<input type="range" min="1" max="{len(images)}" value="{len(images)}" aria-label="Picture">'
    parts = [Html(slider), Html("<output></output>")] if len(images) > 1 else []
    return element("div", *parts, *reversed(images), element("small", text), class_="pictures"), left


def _text(file: Path, kind: str) -> Html:
    """Return the content of a file that a hook has logged."""
    content = file.read_text(encoding="utf-8", errors="replace")
    try:
        if kind == "table":
            found = json.loads(content)
            return table([str(name) for name in found["columns"]], found["rows"][:_ROWS])
    except (ValueError, KeyError, TypeError):  # of another program
        pass
    return element("pre", content[:10_000])


def _config(run: RunData) -> Html:
    if run.config is None:
        return note("The run has no config.")
    typed = {line.lstrip("+~").partition("=")[0].replace("/", ".") for line in run.typed}
    return tree(run.config, typed)


def _hooks(run: RunData) -> Html:
    """Return the hooks in the order in which they are called; nothing if the config is of another version."""
    try:
        slots = slots_of(OmegaConf.create(run.config))
    except (UserError, OmegaConfBaseException, AttributeError, KeyError, TypeError, ValueError):
        return Html()
    rows = [(slot.name, slot.priority, ", ".join(slot.mount_points or ("class not imported",))) for slot in slots]
    return table(("hook", "priority", "called at"), rows)


def _checkpoints(run: RunData) -> Html:
    found = candidates(*checkpoint_folders(run.path))
    best = None if run.result is None or run.result.best is None else Path(run.result.best.checkpoint).name
    notes = {path: "the best" if path.name == best else "the last" if path == found[0] else "" for path in found}
    rows = [(shown(path), f"{path.stat().st_size / 2**20:.1f} MiB", notes[path]) for path in found]
    return table(("checkpoint", "size", ""), rows) if rows else Html()


def _versions(run: RunData) -> Html:
    if run.result is None:
        return Html()
    git = run.result.git
    changed = " with uncommitted changes" if git.get("dirty") else ""
    return facts({**run.result.versions, "git commit": git and f"{git.get('commit')}{changed}"})

"""The page of a run, or of several runs: their results, the differences of their configs, and their curves."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from hydraloop.commands.report.page import Html, Page, element, facts, note, section, table
from hydraloop.commands.report.run_data import LAYOUT, Curve, RunData, charts
from hydraloop.errors import printable
from hydraloop.files.atomic import parsed_json, read_bytes
from hydraloop.files.changes import differences
from hydraloop.files.environment import shown
from hydraloop.files.terminal import duration, number

_BYTES = 4_000_000
"""The largest picture of a page."""
_ROWS = 100
"""Rows of a table that a hook has logged."""
_LINES, _END = 30, 6_000
"""Lines and bytes at the end of a log."""
_FORMATS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg"}


def write(runs: Sequence[RunData], output: Path, *, follow: bool = False) -> bool:
    """Write the page, and return whether a run trains or waits for it. Errors: as of `Page.write`.

    Args:
        follow: whether the page reloads itself until all runs have ended.
    """
    is_running = any(run.status in ("running", "queued") for run in runs)
    title = shown(runs[0].path) if len(runs) == 1 else f"{len(runs)} runs"
    page = Page(f"{title} - hydraloop")
    if len(runs) == 1:
        (run,) = runs
        config = element("pre", yaml.safe_dump(run.config, sort_keys=False)) if run.config else None
        body = [
            head(title, run.status, summary(run) | run.subject, {"": run.command}),
            *problem(run, run.status),
            section("Curves", curves(page, {"": run.curves})),
            section("Pictures, tables and texts", *_objects(run)),
            section("Config", config or note("The run has no config."), is_open=config is None),
        ]
    else:
        names, found = [run.path.name for run in runs], [summary(run) | run.subject for run in runs]
        names = names if len(set(names)) == len(names) else [shown(run.path) for run in runs]
        shared = {name: value for name, value in found[0].items() if all(one.get(name) == value for one in found)}
        body = [
            head(title, None, shared, dict(zip(names, (run.command for run in runs), strict=True))),
            section("Results", _results(names, runs, [{k: one[k] for k in one if k not in shared} for one in found])),
            section("Differences of the configs", _differences(names, runs)),
            section("Curves", curves(page, dict(zip(names, (run.curves for run in runs), strict=True)))),
        ]
    page.write(output, *body, reload=follow and is_running)
    return is_running


def head(title: str, status: str | None, known: Mapping[str, object], commands: Mapping[str, str | None]) -> Html:
    """Return the head of a page. Each command has a button that copies it."""
    copy = Html('<button type="button" class="copy">copy</button>')
    lines = [
        element("div", text, element("pre", element("code", printable(command)), copy), class_="command")
        for text, command in commands.items()
        if command
    ]
    return element("header", element("h1", title), status and badge(status), facts(known), *lines)


def badge(status: str) -> Html:
    """Return a status as a colored word."""
    return element("span", status, class_=f"badge {status}")


def summary(run: RunData) -> dict[str, object]:
    """Return what a run has reached, and what it has used, by name."""
    found: dict[str, object] = {}
    result, last = run.result, run.records[-1] if run.records else None
    if result is not None and result.objective is not None:
        found[result.objective.metric] = f"{number(result.objective.value)}{result.note or ' (best)'}"
    found["iterations"] = last and last.iteration
    if result is not None:
        found |= {f"test {name}": number(value) for name, value in result.test_metrics.items()}
        changed = " and changes" if result.git.get("dirty") else ""
        commit = result.git and f"{str(result.git.get('commit'))[:10]}{changed}"
        found |= {"time": duration(result.seconds), "git commit": commit}
    if "perf/memory" in run.curves:
        found["memory"] = f"{max(run.curves['perf/memory'].values):.0f} MiB"
    return found


def curves(page: Page, runs: Mapping[str, Mapping[str, Curve]]) -> Html:
    """Return the charts of runs, by their names in the legend."""
    plots = [page.figure(title, traces, LAYOUT) for title, traces in charts(runs)]
    return element("div", *plots, class_="grid") if plots else note("There are no records.")


def problem(run: RunData, status: str) -> Iterator[Html]:
    """Yield why a run has no result, or not a good one."""
    result = run.result
    if status == "running":
        yield note("This run has not ended. The page shows its records until now.")
    elif result is None:
        yield note("The run has no result.json: its process was killed, or it has not begun.")
    elif result.error or result.reason:
        yield section("Error" if result.error else "Reason", element("pre", result.error or result.reason))
    if status in ("failed", "interrupted") and (log := run.file("train.log")) is not None:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _END))
            lines = file.read().decode("utf-8", "replace").splitlines()[-_LINES:]
        yield section("The end of the log", element("pre", "\n".join(map(printable, lines))))


def _objects(run: RunData) -> Iterator[Html]:
    """Yield the last of what hooks have logged under each name."""
    others = []
    last = {one.name: (record.iteration, one) for record in run.records for one in record.objects}
    for name, (iteration, one) in last.items():
        file = run.file(one.path)
        content = None if file is None or file.stat().st_size > _BYTES else _content(file, one.kind)
        if content is None:
            others.append(f"{name} ({one.kind}): {shown(run.path / one.path)}")
        else:
            yield element("figure", element("figcaption", f"{name}, iteration {iteration:,}"), content)
    if others:
        yield note(f"Not shown: {'; '.join(others)}")


def _content(file: Path, kind: str) -> Html | None:
    """Return the content of a file that a hook has logged; None if it cannot be shown."""
    content = read_bytes(file)
    if kind == "image":
        form = next((form for start, form in _FORMATS.items() if content.startswith(start)), None)
        source = f"data:image/{form};base64,{base64.b64encode(content).decode()}"
        return None if form is None else element("img", src=source, alt=file.name)
    text = content.decode("utf-8", "replace")
    if kind == "table":
        with suppress(ValueError, KeyError, TypeError):  # of another program
            found = parsed_json(text)
            return table([str(name) for name in found["columns"]], found["rows"][:_ROWS])
    return element("pre", text[:10_000]) if kind in ("table", "text") else None


def _results(names: Sequence[str], runs: Sequence[RunData], found: Sequence[Mapping[str, object]]) -> Html:
    columns = list(dict.fromkeys(name for one in found for name in one))
    known = zip(names, runs, found, strict=True)
    rows = [(name, badge(run.status), *map(one.get, columns)) for name, run, one in known]
    return table(("run", "status", *columns), rows)


def _differences(names: Sequence[str], runs: Sequence[RunData]) -> Html:
    """Return a table of the keys whose values differ, with a column for each run."""
    configs = [run.config or {} for run in runs]
    changes = [one for config in configs[1:] for one in differences(configs[0], config)]
    keys = dict.fromkeys(one.key for one in changes if one.key != "resume")  # it changes no result
    rows = [(element("code", key), *(run.value(key) for run in runs)) for key in keys]
    return table(("key", *names), rows) if rows else note("The configs are equal.")

"""A page of HTML: its elements, and its charts by plotly. It needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np

from hydraloop.errors import UserError
from hydraloop.files import atomic
from hydraloop.files.terminal import number

if TYPE_CHECKING:
    from rich.table import Table

_LONG = 30
"""Characters of a cell that a narrow column may cut. Then the mouse shows all of them."""


class Html(str):
    """A text that is HTML already."""


def html(value: object) -> Html:
    """Return a value as HTML: a text is escaped, a number has 4 significant digits."""
    return value if isinstance(value, Html) else Html(escape(number(value)))


def element(name: str, *content: object, **attributes: object) -> Html:
    """Return an element. `class_` is the attribute `class`; an attribute that is None is left out."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    opening = "".join(f' {key}="{escape(str(value))}"' for key, value in given.items())
    return Html(f"<{name}{opening}>{''.join(html(one) for one in content if one is not None)}</{name}>")


def section(title: str, *content: object, is_open: bool = True) -> Html:
    """Return a part of the page that can be folded; nothing if it is empty."""
    if not any(content):
        return Html()
    heading = element("summary", element("h2", title))
    return element("details", heading, *filter(None, content), class_="section", open="" if is_open else None)


def table(headers: Iterable[object], rows: Iterable[Iterable[object]]) -> Html:
    """Return a table. A cell that is None is empty."""
    head = element("tr", *(element("th", header, scope="col") for header in headers))
    body = [element("tr", *map(_cell, row)) for row in rows]
    return element("div", element("table", element("thead", head), element("tbody", *body)), class_="wide")


def rich_table(found: Table, *, links: bool = False) -> Html:
    """Return a table of the terminal, without empty columns. It can be sorted, and has a filter.

    Args:
        links: whether the first cell of a row is the number of a job, and opens its report.
    """
    named = {str(column.header): [*map(str, column.cells)] for column in found.columns}
    headers, columns = zip(*((name, cells) for name, cells in named.items() if any(cells)), strict=True)
    if links:
        columns = ([element("a", job, href=f"#job-{job}") for job in columns[0]], *columns[1:])
    field = Html('<input type="search" placeholder="Filter: failed lr=0.01" aria-label="Filter">')
    return element("div", field, table(headers, zip(*columns, strict=True)), class_="jobs")


def _cell(value: object) -> Html:
    title = value if isinstance(value, str) and len(value) > _LONG and not isinstance(value, Html) else None
    return element("td", "" if value is None else value, title=title)


def note(text: str) -> Html:
    """Return a remark; nothing if it is empty."""
    return element("p", text, class_="note") if text else Html()


def facts(named: Mapping[str, object]) -> Html:
    """Return a list of names and values, without those that are None or empty."""
    shown = {name: f"{value:,}" if isinstance(value, int) else value for name, value in named.items() if value}
    parts = [element("div", element("dt", name), element("dd", value)) for name, value in shown.items()]
    return element("dl", *parts) if parts else Html()


FILENAME = "report.html"
SECONDS = 10
"""After so many seconds, a page that is followed is written again, and reloads itself."""
_START = b"<!doctype html><!-- hydraloop report -->"
_TAG = re.compile(r"<(?!br>|/?b>|/?extra>)")
"""Begins a tag that plotly would draw: a link, an image. Our labels have line breaks."""


class Page:
    """A page, to which figures are added.

    Args:
        title: of the page.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._figures: list[str] = []

    def figure(self, title: str, data: list[Any], layout: Mapping[str, Any]) -> Html:
        """Add a figure of plotly, and return its place in the page.

        Args:
            title: above it.
            data: traces. Arrays of numpy become float32.
            layout: of plotly, without colors.
        """
        text = json.dumps({"data": data, "layout": layout}, default=_encoded, allow_nan=False)
        self._figures.append(_TAG.sub("\u2039", text).replace("<", "\\u003c"))
        place = element("div", class_="plot", data_figure=len(self._figures) - 1)
        return element("figure", element("figcaption", title), place)

    def write(self, path: Path, *body: Html, reload: bool = False) -> None:
        """Write the page.

        Args:
            path: of the file.
            body: the parts of the page.
            reload: whether the page reloads itself every `SECONDS`.

        Raises:
            UserError: the file exists, and is not a report.
            OSError: it cannot be written.
        """
        from plotly.offline import get_plotlyjs

        if path.is_dir() or (path.exists() and not path.read_bytes().startswith(_START)):
            raise UserError(f"{path} exists, and is not a report", key="output", remedy="Name another file.")
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = files("hydraloop.commands.report")
        style, script, page = ((folder / f"page.{end}").read_text("utf-8") for end in ("css", "js", "html"))
        scripts = [get_plotlyjs() if self._figures else "", script]
        hashes = (base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts)
        policy = " ".join(f"'sha256-{one}'" for one in hashes)
        figures = "".join(
            f'<script type="application/json" id="figure-{index}">{text}</script>\n'
            for index, text in enumerate(self._figures)
        )
        text = Template(page).substitute(
            title=html(self._title),
            made=html(time.strftime("%Y-%m-%d %H:%M")),
            policy=policy,
            reload=SECONDS if reload else "",
            style=style,
            body="\n".join(body),
            figures=figures,
            plotly=scripts[0],
            script=scripts[1],
        )
        atomic.write_bytes(path, text.encode("utf-8", "replace"), flush=False)


def _encoded(values: np.ndarray) -> dict[str, str]:
    """Return an array as plotly reads it."""
    with np.errstate(over="ignore"):  # becomes infinite
        return {"dtype": "f4", "bdata": base64.b64encode(values.astype("<f4").tobytes()).decode()}

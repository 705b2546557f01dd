"""Pieces of HTML. Every text from outside is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING

from hydraloop.files.formats import number

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


def rich_table(found: Table) -> Html:
    """Return a table of the terminal. It can be sorted, and has a filter."""
    headers, columns = zip(*((column.header, map(str, column.cells)) for column in found.columns), strict=True)
    field = Html('<input type="search" placeholder="Filter: failed lr=0.01" aria-label="Filter">')
    return element("div", field, table(headers, zip(*columns, strict=True)), class_="jobs")


def _cell(value: object) -> Html:
    title = value if isinstance(value, str) and len(value) > _LONG and not isinstance(value, Html) else None
    return element("td", "" if value is None else value, title=title)


def note(text: str) -> Html:
    """Return a remark."""
    return element("p", text, class_="note")


def facts(named: Mapping[str, object]) -> Html:
    """Return a list of names and values, without those that are None or empty."""
    shown = {name: f"{value:,}" if isinstance(value, int) else value for name, value in named.items() if value}
    parts = [element("div", element("dt", name), element("dd", value)) for name, value in shown.items()]
    return element("dl", *parts) if parts else Html()

"""Pieces of HTML. Every text from outside is escaped here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from hydraloop.engine.report.formats import number

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
    return Html(f"<{name}{opening}>{''.join(map(html, content))}</{name}>")


def section(title: str, *content: object, is_open: bool = True) -> Html:
    """Return a part of the page that can be folded; nothing if it is empty."""
    if not any(content):
        return Html()
    heading = element("summary", element("h2", title))
    return element("details", heading, *filter(None, content), class_="section", open="" if is_open else None)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, sortable: bool = False) -> Html:
    """Return a table; a sortable one has a filter above it. A cell that is None is empty."""
    rows = list(rows)
    numeric = [any(isinstance(cell, int | float) for cell in column) for column in zip(*rows, strict=True)]
    kinds = ["number" if one else None for one in numeric or [False] * len(headers)]
    columns = zip(headers, kinds, strict=True)
    head = element("tr", *(element("th", header, scope="col", class_=kind) for header, kind in columns))
    body = [element("tr", *map(_cell, row)) for row in rows]
    found = element("div", element("table", element("thead", head), element("tbody", *body)), class_="wide")
    if not sortable:
        return found
    hint = "Filter: failed lr=0.01"
    return element("div", Html(f'<input type="search" placeholder="{hint}" aria-label="Filter">'), found, class_="jobs")


def _cell(value: object) -> Html:
    if isinstance(value, int | float):
        return element("td", f"{value:,}" if isinstance(value, int) else value, class_="number", data_value=value)
    title = value if isinstance(value, str) and len(value) > _LONG and not isinstance(value, Html) else None
    return element("td", "" if value is None else value, title=title)


def facts(named: Mapping[str, object]) -> Html:
    """Return a list of names and values, without those that are None or empty."""
    shown = {name: value for name, value in named.items() if value is not None and value != ""}
    return element("dl", *(element("div", element("dt", name), element("dd", value)) for name, value in shown.items()))


def tree(node: Any, typed: Collection[str], key: str = "") -> Html:
    """Return a config as a tree that can be folded, in which typed keys are marked.

    Args:
        typed: their full keys.
        key: of the node.
    """
    parts = []
    for name, value in node.items() if isinstance(node, Mapping) else enumerate(node):
        full = f"{key}.{name}" if key else str(name)
        mark = "typed" if full in typed else None
        if isinstance(value, Mapping | list) and value:
            is_open = any(one == full or one.startswith(f"{full}.") for one in typed)
            heading = element("summary", str(name), class_=mark)
            parts.append(element("details", heading, tree(value, typed, full), open="" if is_open else None))
        else:
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            parts.append(element("div", element("b", str(name)), ": ", shown, class_=mark))
    return element("div", *parts, class_="tree")

"""Page: one HTML file that needs no network. The scripts are named by their hashes, so that no other script runs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from hydraloop.commands.report.markup import Html, element, html
from hydraloop.errors import UserError
from hydraloop.files import atomic

FILENAME = "report.html"
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

    def write(self, path: Path, *body: Html) -> None:
        """Write the page.

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

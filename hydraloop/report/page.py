"""Page: one HTML file that needs no network. The scripts are named by their hashes, so that no other script runs."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shlex
import time
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from hydraloop.errors import UserError
from hydraloop.report.markup import Html, element, html
from hydraloop.run_files import atomic

FILENAME = "report.html"
_START = b"<!doctype html><!-- hydraloop report -->"
_TAG = re.compile(r"<(?!br>|/?b>|/?extra>)")
"""Begins a tag that plotly would draw: a link, an image. Optuna's own figures have line breaks."""


class Page:
    """A page, to which figures are added.

    Args:
        title: of the page.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._figures: list[str] = []

    def figure(
        self, title: str, data: list[Any], layout: Mapping[str, Any] | None = None, *, of_optuna: bool = False
    ) -> Html:
        """Add a figure of plotly, and return its place in the page.

        Args:
            title: above it.
            data: traces. Arrays of numpy become float32.
            layout: of plotly, without colors.
            of_optuna: whether it has the width of the page, and colors that are inverted on a dark page.
        """
        self._figures.append(json.dumps(_safe({"data": data, "layout": layout or {}})).replace("<", "\\u003c"))
        place = element("div", class_="plot", data_figure=len(self._figures) - 1)
        return element("figure", element("figcaption", title), place, class_="optuna" if of_optuna else None)

    def write(self, path: Path, *body: Html) -> None:
        """Write the page.

        Raises:
            UserError: the file exists, and is not a report; or its folder does not exist.
            OSError: it cannot be written.
        """
        from plotly.offline import get_plotlyjs

        if not path.parent.is_dir():
            remedy = f"Create it: {shlex.join(['mkdir', '-p', str(path.parent)])}"
            raise UserError(f"there is no folder {path.parent}", key="output", remedy=remedy)
        if path.is_dir() or (path.exists() and not path.read_bytes().startswith(_START)):
            raise UserError(f"{path} exists, and is not a report", key="output", remedy="Name another file.")
        folder = files("hydraloop.report")
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


def _safe(value: Any) -> Any:
    """Return a part of a figure as JSON: arrays in base64, NaN as null, and no tags in texts, such as links."""
    if isinstance(value, str):
        return _TAG.sub("\u2039", value)
    if isinstance(value, Mapping):
        return {str(name): _safe(item) for name, item in value.items() if name != "template"}
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiu":
        shape = {"shape": ", ".join(map(str, value.shape))} if value.ndim > 1 else {}
        with np.errstate(over="ignore"):  # becomes infinite
            content = value.astype("<f4").tobytes()
        return {"dtype": "f4", "bdata": base64.b64encode(content).decode(), **shape}
    if isinstance(value, list | tuple | np.ndarray):
        return [_safe(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value

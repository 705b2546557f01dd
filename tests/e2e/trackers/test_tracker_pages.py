"""A sweep on the pages of MLflow and TensorBoard in a browser. Pictures are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.projects import Project, Run

pages = pytest.importorskip("tests.e2e.trackers.pages", reason="selenium is not installed", exc_type=ImportError)

_ASSISTANT = "[data-component-id='mlflow.assistant.chat_panel.close']"
"""Closes the panel that MLflow opens at the first visit."""
PATIENT = [f"hooks.{name}.flush_timeout=60" for name in ("mlflow", "tensorboard")]

pytestmark = [
    pytest.mark.nightly,  # two jobs, two servers and a browser
    pytest.mark.skipif(pages.why_no_browser() is not None, reason=str(pages.why_no_browser())),
]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with a sweep of two jobs."""
    project = Project.make(tmp_path_factory.mktemp("pages") / "project")
    trackers = ["hooks=[mlflow,tensorboard]", *PATIENT]
    done = project.train("-m", "optimizer.lr=1e-3,1e-2", "engine.max_epochs=3", *trackers)
    assert done.code == 0, done.text
    return project


@pytest.fixture(scope="module")
def mlflow(swept: Project) -> Iterator[str]:
    """The address of `mlflow ui`."""
    quick = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # ten processes that these tests do not need
    with pages.served(["mlflow", "ui", "--workers", "1"], swept.path, **quick) as address:
        yield address


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[pages.Browser]:
    with pages.browser(tmp_path) as opened:
        yield opened


def test_mlflow_shows_the_charts_of_a_run(swept: Project, mlflow: str, browser: pages.Browser) -> None:
    browser.driver.get(f"{mlflow}/#/experiments/1/runs?workflowType=machine_learning")
    browser.click(_ASSISTANT)
    browser.click('.ag-row [data-component-id*="runnamecell"]')  # the parent is folded
    browser.shows("lr=0.001", "lr=0.01")
    browser.keep("mlflow_experiment")

    browser.click("a", text="lr=0.01")
    browser.shows("Model metrics", "val/accuracy", _shown(swept.jobs[1].result["val_metrics"]["accuracy"]))
    browser.keep("mlflow_run")
    browser.click("[role=tab]", text="Model metrics")
    browser.until(
        lambda: browser.driver.execute_script(_SCROLL) or "(train/loss)" in browser.text, "the chart of the loss"
    )
    browser.until(lambda: browser.driver.execute_script(_HAS_LOSS), "its line")
    points = browser.driver.execute_script(_POINTS_OF_THE_LOSS)
    assert points == [[record["iteration"], record["loss"]] for record in _train(swept.jobs[1])]
    browser.keep("mlflow_charts")


def test_tensorboard_shows_the_scalars_and_the_table_of_hyperparameters(swept: Project, browser: pages.Browser) -> None:
    (day,) = swept.path.glob("multirun/*")
    with pages.served(["tensorboard.main", "--logdir", str(day)], swept.path) as address:
        (sweep,) = day.iterdir()
        runs = [f"{sweep.name}/{job}/tensorboard/lr={lr}" for job, lr in enumerate(("0.001", "0.01"))]
        browser.driver.get(f"{address}/#scalars")
        browser.shows(*runs, "train/loss", "test/accuracy")
        browser.until(lambda: browser.count("path.line[d]") >= 10, "lines in its charts")
        browser.keep("tensorboard_scalars")

        browser.driver.get(f"{address}/#hparams")
        browser.driver.refresh()
        accuracies = [run.result["val_metrics"]["accuracy"] for run in swept.jobs]
        browser.shows(*runs, "TABLE VIEW", "optimizer.lr", "0.0010000", *(f"{value:#.5g}" for value in accuracies))
        browser.keep("tensorboard_hparams")


_SCROLL = """
for (const one of document.querySelectorAll("*")) if (one.scrollHeight > one.clientHeight + 100) one.scrollTop += 200;
"""
_HAS_LOSS = """
return [...document.querySelectorAll(".js-plotly-plot")].some(
  plot => (plot.data || []).some(line => line.metricKey === "train/loss" && (line.x || []).length > 0));
"""
_POINTS_OF_THE_LOSS = """
const lines = [...document.querySelectorAll(".js-plotly-plot")].flatMap(plot => plot.data);
const loss = lines.find(line => line.metricKey === "train/loss");
return loss.x.map((x, place) => [x, loss.y[place]]);
"""


def _train(run: Run) -> list[dict[str, float]]:
    return [record for record in run.records if record["mode"] == "train"]


def _shown(value: float) -> str:
    """The first digits of a number, as in the page's table."""
    return f"{value:.6f}"[:-1]

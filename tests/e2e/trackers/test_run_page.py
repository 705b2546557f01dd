"""The printed address of a run in MLflow, in a browser: it opens on Model training and shows pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydraloop.files.metrics_log import LoggedObject, Record
from hydraloop.tracking.tracker import Finish
from tests.tracking.mlflow.runs import BEGAN, QUIET, empty_database, folder, opened, run_in, send_files, training

pages = pytest.importorskip("tests.e2e.trackers.pages", reason="selenium is not installed", exc_type=ImportError)

__all__ = ["empty_database", "folder"]
pytestmark = [
    QUIET,
    pytest.mark.nightly,  # a server and a browser
    pytest.mark.skipif(pages.why_no_browser() is not None, reason=str(pages.why_no_browser())),
]


def test_the_page_of_a_run(folder: Path) -> None:
    from PIL import Image

    run = run_in(folder / "run")
    media = run.run_dir / "media" / "val"
    media.mkdir(parents=True)
    Image.new("RGB", (300, 300), "red").save(media / "predictions_iter_20.png")
    picture = LoggedObject("image", "val/predictions", "media/val/predictions_iter_20.png")
    tracker = opened(run)
    tracker.send([*training(0, 5), Record(5, "val", 1, 20, BEGAN, {"accuracy": 0.5}, {}, (picture,))])
    tracker.finish(Finish("finished"))
    send_files(tracker)
    printed = str(tracker.where).split(" http://localhost:5000")[1]
    quick = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with pages.served(["mlflow", "ui", "--workers", "1"], folder, **quick) as address, pages.browser(folder) as browser:
        browser.driver.get(address + printed)
        browser.shows("a/run", "val/accuracy", "Model metrics")
        assert "Observability" not in browser.text, "the menu is that of GenAI"
        browser.keep("mlflow_run")
        browser.click("[role=tab]", text="Model metrics")
        browser.shows("train", "a/run (train/loss)")
        browser.until(lambda: browser.count("img[src^='data:image'], img[src*='get-artifact']") >= 1, "the picture")
        browser.shows("val/predictions")  # its name
        browser.keep("mlflow_run_picture")

"""The pages in a browser: nothing is loaded, nothing fails, and tables, pictures and trees react."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_runs import Image, RecordLog
from tests.report.test_sweeps import write_records
from tests.report.written import HOSTILE, report, write_run
from tests.sweeps.written import finished, sweep, write

pages = pytest.importorskip("tests.e2e.trackers.pages", reason="selenium is not installed", exc_type=ImportError)

pytestmark = [
    pytest.mark.nightly,  # a browser
    pytest.mark.skipif(pages.why_no_browser() is not None, reason=str(pages.why_no_browser())),
]


def opened(browser: Any, file: Path, *, width: int = 1400, scheme: str = "light") -> None:
    """Open a page, and wait until all figures are drawn."""
    driver = browser.driver
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    size = {"width": width, "height": 1200, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(file.as_uri())
    length = driver.execute_script("return document.documentElement.scrollHeight")
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size | {"height": length})
    waiting = "[...document.querySelectorAll('.plot:not(.js-plotly-plot)')].some((one) => one.offsetParent)"
    browser.until(lambda: driver.execute_script(f"return !{waiting}"), "figures")


def check(browser: Any, name: str) -> None:
    """Check that nothing failed, nothing was loaded, and the page is not wider than the window; keep a picture."""
    driver = browser.driver
    assert driver.get_log("browser") == []
    assert driver.execute_script("return performance.getEntriesByType('resource').map(one => one.name)") == []
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    cut = "return [...document.querySelectorAll('.command *')].some(one => one.scrollWidth > one.clientWidth + 1)"
    assert driver.execute_script(cut) is False
    no_link = "main a:not([href^='#job-']), main script, svg a"
    assert driver.execute_script(f'return document.querySelectorAll("{no_link}").length') == 0
    browser.keep(name)


def visible(browser: Any, selector: str) -> list[str]:
    """Return the texts of visible elements."""
    return [one.text for one in browser._all(selector) if one.is_displayed()]


def test_a_sweep_is_sorted_and_filtered(tmp_path: Path) -> None:
    made = sweep(tmp_path / "sweep", "optimizer.lr=1e-3,1e-2,1e-1", f"task=a,{HOSTILE}")
    values = (0.8, 0.9, 0.7, 0.95, 0.6)
    write(
        made,
        {n: finished(value) for n, value in enumerate(values)} | {5: finished(None, state="failed", error=HOSTILE)},
    )
    write_records(made, 0, 1, 2, 3, 4)
    assert report(made.path) == 0
    with pages.browser(tmp_path) as browser:
        for width, scheme in ((1400, "light"), (1400, "dark"), (390, "light")):
            opened(browser, made.path / "report.html", width=width, scheme=scheme)
            check(browser, f"report_sweep_{width}_{scheme}")
        opened(browser, made.path / "report.html")
        jobs = ".jobs tbody td:first-child"
        assert visible(browser, jobs) == ["3", "1", "0", "2", "4", "5"]
        browser.click(".jobs th", text="job")
        assert visible(browser, jobs) == ["0", "1", "2", "3", "4", "5"]
        for _ in range(2):
            browser.click(".jobs th", text="accuracy")
        assert visible(browser, jobs) == ["3", "1", "0", "2", "4", "5"]  # a job without a value is last
        browser.find(".jobs input").send_keys("lr=1e-1 finished")
        assert visible(browser, jobs) == ["4"]
        browser.click("summary", text="Jobs")
        assert visible(browser, jobs) == []
        check(browser, "report_sweep_filtered")
        opened(browser, made.path / "report.html")
        browser.click(".jobs a", text="3")
        shown = (
            "return [...document.querySelectorAll('article')].filter((one) => one.offsetParent).map((one) => one.id)"
        )
        browser.until(lambda: browser.driver.execute_script(shown) == ["job-3"], "the report of the job")
        check(browser, "report_sweep_job")
        browser.driver.execute_script("console.error('seen')")
        assert len(browser.driver.get_log("browser")) == 1, "the check above would see an error"


def test_a_page_that_reloads_itself_keeps_the_scroll_position(tmp_path: Path) -> None:
    assert report(write_run(tmp_path / "run")) == 0
    page = tmp_path / "run" / "report.html"
    page.write_text(page.read_text().replace('data-reload=""', 'data-reload="1"'))
    with pages.browser(tmp_path) as browser:
        driver = browser.driver
        driver.set_window_size(800, 400)
        driver.get(page.as_uri())
        driver.execute_script("scrollTo(0, 300)")
        loaded = driver.execute_script("return performance.timeOrigin")
        browser.until(lambda: driver.execute_script("return performance.timeOrigin") > loaded, "a reload")
        browser.until(lambda: driver.execute_script("return scrollY") == 300, "the scroll position")


def test_a_run_shows_its_pictures_and_its_config(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", name=HOSTILE)
    (run / ".hydra" / "config.yaml").write_text(json.dumps({"optimizer": {"lr": 1}, "data": {"train": {HOSTILE: 2}}}))
    log = RecordLog(run / "metrics.jsonl")
    for number in range(1, 4):
        Image.new("RGB", (99, 99), (80 * number, 0, 0)).save(run / f"{number}.png")
        picture = {"kind": "image", "name": "seen", "path": f"{number}.png"}
        log.append({"mode": "val", "epoch": 1, "iteration": number, "objects": [picture]})
    log.close()
    other = write_run(tmp_path / "other", lr="0.1")
    assert report(run) == 0
    assert report(run, other, "--output", tmp_path / "both.html") == 0
    with pages.browser(tmp_path) as browser:
        for width, scheme in ((1400, "light"), (390, "dark")):
            opened(browser, run / "report.html", width=width, scheme=scheme)
            check(browser, f"report_run_{width}_{scheme}")
            opened(browser, tmp_path / "both.html", width=width, scheme=scheme)
            check(browser, f"report_runs_{width}_{scheme}")
        opened(browser, run / "report.html")
        assert browser.count("figure img") == 1
        browser.click("summary", text="Config")
        assert f"{HOSTILE}: 2" in browser.text
        browser.click(".copy")
        browser.until(lambda: visible(browser, ".copy") == ["copied"], "copied")
        assert browser.driver.execute_script("return String(getSelection())") == "python train.py optimizer.lr=0.01"
        check(browser, "report_run_unfolded")

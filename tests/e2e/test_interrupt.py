"""Ctrl-C in the middle of a run."""

from __future__ import annotations

import signal
import time

from tests.e2e.projects import Project


def test_an_interrupted_run_says_so_and_can_be_resumed(project: Project) -> None:
    process = project.start(
        "engine.max_epochs=100000", "data.loader.batch_size=512", "default_hooks.checkpoint.interval=5"
    )
    try:
        until = time.monotonic() + 120
        while not (project.runs and project.run.path.joinpath("checkpoints", "last_checkpoint").exists()):
            assert process.poll() is None, "the run has ended"
            assert time.monotonic() < until, "the run has no checkpoint"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in output
    assert "error: interrupted" in output
    result = project.run.result
    assert result["status"] == "interrupted"
    assert not list(project.run.path.rglob("*.part")), "a file was left unfinished"

    reached = result["progress"]["epoch"]
    resumed = project.train("resume=auto", f"engine.max_epochs={reached + 1}", "data.loader.batch_size=512")
    assert resumed.code == 0, resumed.text
    assert project.run.result["status"] == "finished"
    assert project.run.result["progress"]["epoch"] == reached + 1

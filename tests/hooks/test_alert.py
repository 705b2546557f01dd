"""The hook `alert`: each alert is told once, by a command and a webhook, which no file can set."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import hydraloop
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.errors import UserError
from hydraloop.hooks import AlertHook, LoggerHook, RuntimeInfoHook
from hydraloop.run_files.record_log import FILENAME, read_all
from hydraloop.run_files.record_writer import RecordLog
from hydraloop.safety.secrets import remember
from hydraloop.tracking import alert_log
from hydraloop.tracking.alert import AlertTracker, _service_of, check_address
from hydraloop.tracking.cursor import Cursor
from hydraloop.tracking.follower import Follower
from hydraloop.tracking.hook import TrackerError
from hydraloop.tracking.tracker import Finish, Run, UnusableError
from hydraloop.validate.typed_only import check_alerts
from tests.e2e.projects import Project
from tests.helpers import batches, make_engine
from tests.tracking import runs
from tests.tracking.service import Service
from tests.tracking.training import until

APPEND = "import sys; open({file!r}, 'a').write(sys.argv[-1] + chr(10))"
KILL = f"""
import os, signal
is_first = not os.path.exists({{file!r}})
{APPEND}
if is_first:
    os.kill(os.getppid(), signal.SIGKILL)
"""


def told(file: Path) -> list[str]:
    return [line.partition(": ")[2].partition(": ")[2] for line in file.read_text().splitlines()]


class Waits(Hook):
    """Waits in each iteration until something is so."""

    def __init__(self, reached: Callable[[Engine], bool]) -> None:
        self._reached = reached

    def after_train_iter(self, engine: Engine, *_: Any) -> None:
        if engine.progress.iteration == 2:
            until(lambda: self._reached(engine))


def training(run_dir: Path, reached: Callable[[Engine], bool] = lambda engine: True, **options: Any) -> Engine:
    hooks: dict[str, Hook] = {"runtime_info": RuntimeInfoHook(), "logger": LoggerHook(interval=1)}
    hooks |= {"alert": AlertHook(**options), "waits": Waits(reached)}
    run_dir.mkdir(exist_ok=True)
    return make_engine(run_dir, hooks, train=batches(3), val=batches(1))


@pytest.mark.parametrize("is_killed", [False, True])
def test_each_alert_is_told_once_while_it_trains(is_killed: bool, tmp_path: Path) -> None:
    """Also if the sender is killed while it tells the first one."""
    file = tmp_path / "told"
    words = [sys.executable, "-c", (KILL if is_killed else APPEND).format(file=str(file))]
    with Service().up() as service:
        webhook = f"json://127.0.0.1:{service.port}/"
        engine = training(
            tmp_path / "run", lambda engine: file.exists(), when="loss > -1", notify_command=words, webhook=webhook
        )
        engine.train()
    texts = told(file)
    assert texts[0].startswith("loss > -1, at iteration 1: loss ")
    assert texts[1:] == ["finished"]
    posted = [body["message"].partition(": ")[2].partition(": ")[2] for body in service.bodies("/")]
    assert posted == texts
    assert [line.partition("run: ")[2] for line in alert_log.lines(tmp_path / "run")] == texts


def test_a_service_that_is_down_ends_the_run_only_with_on_error_raise(tmp_path: Path) -> None:
    def is_in_trouble(engine: Engine) -> bool:
        link = cast(AlertHook, engine.hooks["alert"])._link
        return link is not None and link.trouble is not None

    options = {"when": "loss > -1", "webhook": "json://127.0.0.1:1/", "flush_timeout": 0.0}
    engine = training(tmp_path / "run", is_in_trouble, **options)
    engine.calls._policies["alert"].on_error = "raise"
    with pytest.raises(TrackerError, match="the service has not taken the message"):
        engine.train()
    engine = training(tmp_path / "other", is_in_trouble, **options)
    engine.train()
    assert "has not taken" in engine.messages.read("tracked")["alert"]


def tracker(run: Run, **options: Any) -> AlertTracker:
    defaults = {"when": None, "patience": None, "on_end": [], "webhook": None, "notify_command": [], "name": "alert"}
    return AlertTracker({**defaults, "metric": "accuracy", "higher": True, **options}, run, {})


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated")
def test_an_alert_arrives_when_the_service_is_back_and_not_again_in_a_resumed_run(tmp_path: Path) -> None:
    run, troubles = runs.described_run(tmp_path / "run"), list[str | None]()
    runs.log_records(tmp_path / "run", 3)
    service, cursor = Service(), Cursor("", {})
    with service.up():
        pass  # it has a port, and is down
    options = {"when": "loss > 0.05", "webhook": f"json://127.0.0.1:{service.port}/"}
    follower = Follower(tracker(run, **options), cursor, run.run_dir, "alert", troubles.append)
    assert follower.step(None) == "in trouble"
    assert "has not taken the message" in str(troubles[0])
    with service.up():
        for memory in ({}, cursor.memory):  # another sender, which knows nothing, and a resumed run
            again = tracker(run, **options)
            again.memory = memory
            cursor.index = cursor.offset = 0
            assert Follower(again, cursor, run.run_dir, "alert", troubles.append).step(None) == "following"
    assert [body["message"] for body in service.bodies("/")] == [
        "hydraloop: digits a/run: loss > 0.05, at iteration 10: loss 0.1"
    ]


def test_the_newest_numbers_are_compared(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / FILENAME)
    for mode, iteration, values in (
        ("train", 1, {"loss": 1.0, "lr": 0.1}),
        ("val", 1, {"accuracy": 0.4, "loss": 0.2}),
        ("train", 2, {"loss": 3.0}),
        ("train", 3, {"loss": 0.5}),
    ):
        log.append({"mode": mode, "epoch": 1, "iteration": iteration, **values})
    log.close()
    for when, at in {
        "loss > 2": 2,
        "accuracy < 0.5 and lr == 0.1": 1,
        "val.loss < 0.3 and train.loss > 2": 2,
        "loss != loss": None,  # none is NaN
        "nothing > 1 or loss < 0.3": 1,
        "iteration == 3": 3,
    }.items():
        one = tracker(runs.described_run(tmp_path / when.replace(" ", "")), when=when)
        one.send(list(read_all(tmp_path / FILENAME)))
        found = alert_log.lines(one.run.run_dir)
        assert len(found) == (at is not None), when
        assert at is None or f", at iteration {at}: " in found[0]


def test_no_better_value_for_long_is_one_alert_until_there_is_a_better_one(tmp_path: Path) -> None:
    one = tracker(runs.described_run(tmp_path), patience=100.0)

    def validated(accuracy: float, seconds_ago: float) -> list[str]:
        log = RecordLog(tmp_path / FILENAME)
        log.append({"mode": "val", "epoch": 1, "iteration": 1, "accuracy": accuracy})
        log.close()
        *_, record = read_all(tmp_path / FILENAME)
        object.__setattr__(record, "timestamp", time.time() - seconds_ago)
        one.send([record])
        for _ in range(2):
            assert one.send_file() is False
        return [line.rpartition(": ")[2] for line in alert_log.lines(tmp_path)]

    object.__setattr__(one.run.attempt, "began", time.time() - 500)
    assert validated(float("nan"), 0)[0].endswith("the best is none yet")
    assert validated(0.5, 101)[1:] == ["no better accuracy for 0:01:40; the best is 0.5"]
    assert len(validated(0.4, 0)) == 2
    assert len(validated(0.6, 50)) == 2
    assert len(validated(0.7, 102)) == 3
    one.finish(Finish("finished"))
    assert len(validated(0.8, 103)) == 3


def test_how_it_ends_is_told_without_secrets(tmp_path: Path) -> None:
    remember({"password": "correct-horse-9"})
    one = tracker(runs.described_run(tmp_path), on_end=["failed", "interrupted"])
    one.finish(Finish("stopped"))
    assert alert_log.lines(tmp_path) == []
    one.finish(Finish("failed", "ValueError: no correct-horse-9 at https://me:hunter22@host\n  Write one."))
    assert alert_log.lines(tmp_path)[0].endswith("failed: ValueError: no *** at https://me:***@host")
    (tmp_path / "tracking" / "alert.alerts.json").write_text('{"a": [')
    assert alert_log.lines(tmp_path) == []


@pytest.mark.parametrize(
    "address",
    [
        *(
            "syslog://",
            "dbus://",
            "macosx://",
            "windows://",
            "apprise://host/token",
            "rsyslog://host",
            "file:///etc/passwd",
        ),
        *("http://127.0.0.1/x", "nonsense", "ntfy://host/topic?attach=/etc/passwd"),
        "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/?template=/etc/passwd",
    ],
)
def test_only_services_on_the_network_are_addresses(address: str) -> None:
    with pytest.raises(UserError, match="not the address of a service"):
        check_address(address, "hooks.alert.webhook")


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated")  # Apprise imports it
def test_a_web_page_is_not_an_address() -> None:
    with pytest.raises(UnusableError):
        _service_of("https://127.0.0.1/page")
    hook = "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"
    assert _service_of(hook).schemas() == {"slack"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"when": "loss >"}, "loss > is not a condition\n    loss >\n          ^"),
        ({"when": "f(loss)"}, "cannot be part of a condition"),
        ({"patience": "soon"}, "'soon' is not a time"),
        ({"on_end": ["done"]}, "'done' is not one of finished, failed, interrupted"),
        ({"webhook_env": "EDITOR"}, "EDITOR has no ALERT in its name"),
        (
            {"notify_command_env": "MY_ALERT"},
            "hooks.alert.notify_command_env: the environment variable MY_ALERT is not",
        ),
        ({"notify_command": "no-such-program now"}, "hooks.alert.notify_command: there is no such program"),
        ({"notify_command": "echo 'now"}, "hooks.alert.notify_command: it is not a command: No closing quotation"),
        ({"webhook": "dbus://"}, "hooks.alert.webhook: it is not the address"),
    ],
)
def test_a_mistake_is_reported_before_training(options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        training(tmp_path / "run", **options).train()
    assert problem in str(raised.value)
    assert not (tmp_path / "run" / FILENAME).exists() or not list(read_all(tmp_path / "run" / FILENAME))


def test_a_webhook_needs_apprise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(UserError, match="package apprise is not installed\n  pip install apprise"):
        training(tmp_path / "run", webhook="ntfy://topic").train()
    training(tmp_path / "run", on_end=["finished"]).train()  # without one, it is not needed
    assert alert_log.lines(tmp_path / "run")[0].endswith("run: finished")


QUICK = ("engine.max_epochs=1", "engine.limit_train_batches=2", "engine.limit_val_batches=1", "engine.test=false")
MINE = "# @package hooks.alert\ndefaults: [alert, _self_]\n"


def test_a_command_and_an_address_are_typed() -> None:
    for option, value in {"notify_command": ["true"], "webhook": "${oc.env:HOME}"}.items():
        cfg = hydraloop.compose(["hooks=[alert]"])
        cfg.hooks.alert[option] = value
        with pytest.raises(UserError, match="a config file may not set this") as raised:
            hydraloop.build(cfg)
        assert raised.value.key == f"hooks.alert.{option}"
        check_alerts(cfg, [f"hooks.alert.{option}"])


@pytest.mark.slow
def test_no_file_sets_a_command_or_an_address(tmp_path: Path) -> None:
    """Neither a config file, nor parameters of the sweeper in it, nor the saved config of a run, nor a cursor."""
    project = Project.make(tmp_path / "project")
    owned = project.path / "owned"
    evil = f"[touch, '{owned}']"
    base = (project.path / "conf" / "config.yaml").read_text()
    project.write("conf/hooks/told.yaml", f"{MINE}notify_command: {evil}\n")
    project.write("conf/hooks/posts.yaml", f"{MINE}webhook: json://localhost/\n")
    project.write(
        "conf/swept.yaml", base + f'\nhydra: {{sweeper: {{params: {{hooks.alert.notify_command: "{evil}"}}}}}}\n'
    )
    for words in (
        ["hooks=told", "--dry-run"],
        ["hooks=told"],
        ["hooks=posts"],
        ["-m", "--config-name=swept", "hooks=[alert]", "seed=0,1"],
    ):
        done = project.train(*QUICK, *words)
        assert done.code != 0, words
        assert "a config file may not set this" in done.text, words
    done = project.train(
        *QUICK, "hooks=alert", f"hooks.alert.notify_command=[touch,{tmp_path / 'typed'}]", "hydra.run.dir=run"
    )
    assert done.code == 0, done.text
    assert any(tmp_path.glob("typed*"))
    run = project.path / "run"
    stored = "".join(path.read_text() for path in [*run.rglob("*.yaml"), *run.rglob("*.json"), run / "train.log"])
    assert "touch" not in stored
    resumed = project.python("-m", "hydraloop", "resume", "run", "engine.max_epochs=2")
    assert "hooks.alert.notify_command: its value is a secret" in resumed.err
    assert "Add the option hooks.alert.notify_command with its value" in resumed.err
    config = run / ".hydra" / "config.yaml"
    config.write_text(config.read_text().replace("- '***'\n    - '***'", f"- touch\n    - {owned}"))
    resumed = project.python("-m", "hydraloop", "resume", "run", "engine.max_epochs=2")
    assert "a config file may not set this" in resumed.err
    cursor = run / "tracking" / "alert.cursor.json"
    cursor.write_text(
        cursor.read_text().replace('"***",\n   "***"', f'"touch", "{owned}"').replace('"ended": 0', '"ended": 9')
    )
    (run / "tracking" / "alert.alerts.json").unlink()
    project.python("-m", "hydraloop", "sync", "run", "--again")
    assert not owned.exists()


@pytest.mark.slow
def test_a_variable_is_read_again_by_a_resumed_run_and_status_shows_alerts(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    file = tmp_path / "told"
    project.write("note.py", APPEND.format(file=str(file)))
    project.write(
        "conf/hooks/mine.yaml", "# @package hooks.alert\ndefaults: [alert, _self_]\nnotify_command_env: MY_ALERT\n"
    )
    mine = {"MY_ALERT": f"{sys.executable} note.py"}
    assert "MY_ALERT is not set" in project.train(*QUICK, "hooks=mine").err
    when = 'hooks.alert.when="loss > 0"'
    done = project.train(*QUICK, "hooks=mine", when, "hydra.run.dir=run", **mine)
    assert done.code == 0, done.text
    assert "alert       2 alerts" in done.text
    resumed = project.python("-m", "hydraloop", "resume", "run", "engine.max_epochs=2", **mine)
    assert resumed.code == 0, resumed.text
    texts = told(file)
    assert texts[0].startswith("loss > 0, at iteration ")
    assert texts[1:] == ["finished", "finished"]
    shown = project.python("-m", "hydraloop", "status", "run").out
    assert shown.count("  alert  ") == 3
    assert "note.py" not in (project.path / "run" / "train.log").read_text()

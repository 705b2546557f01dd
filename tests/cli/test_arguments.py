from __future__ import annotations

import pytest

from hydraloop.commands.train import check_command
from hydraloop.config import arguments
from hydraloop.errors import UserError
from hydraloop.sweeps import check_sweep
from tests.config.composed import composer


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("hooks=ema,profiler", "hooks=[ema,profiler]"),
        ("+hooks=ema,profiler", "+hooks=[ema,profiler]"),
        ("++hooks=ema,profiler", "++hooks=[ema,profiler]"),
        ("default_hooks=timer,logger", "default_hooks=[timer,logger]"),
        ("hooks=ema, profiler", "hooks=[ema, profiler]"),
        ("hooks=a,b,c,d", "hooks=[a,b,c,d]"),
        ("hooks=mine/ema,profiler", "hooks=[mine/ema,profiler]"),
    ],
)
def test_plain_names_are_read_as_a_list(typed: str, read: str) -> None:
    assert arguments.with_hook_lists(["seed=1", typed, "seed=2"]) == (["seed=1", read, "seed=2"], [read])


@pytest.mark.parametrize(
    "typed",
    [
        "hooks=ema",
        "hooks=[ema,profiler]",
        "hooks=[ema],[profiler]",
        "hooks=[],[ema]",
        "hooks='ema,profiler'",
        "hooks='ema','profiler'",
        'hooks="ema,profiler"',
        "hooks=choice(ema,profiler)",
        "hooks=tag(a,choice(ema,profiler))",
        "hooks=glob(*)",
        "hooks=range(1,3)",
        "hooks={ema:1,profiler:2}",
        "hooks=ema,1",
        "hooks=1,2",
        "hooks=null,ema",
        "hooks.ema.priority=1,2",
        "hooks.ema=a,b",
        "~hooks.ema",
        "scheduler=cosine,linear",
        "scheduler={mine:1}",
        "scheduler.cosine={}",
        "~scheduler",
        "optimizer={}",
        "experiment=a,b",
        "my_hooks=a,b",
        "hooks@other=ema",
    ],
)
def test_everything_else_stays_as_it_was_typed(typed: str) -> None:
    assert arguments.with_hook_lists([typed]) == ([typed], [])


def test_dry_run_is_a_flag_among_hydras() -> None:
    args = arguments.read(["seed=1", "--dry-run", "-m"])
    assert (args.dry_run, args.multirun, args.overrides) == (True, True, ["seed=1"])
    assert not arguments.read(["seed=1"]).dry_run


def test_bytes_that_are_not_text_are_refused() -> None:
    """The config file of a run could not have them."""
    with pytest.raises(UserError, match=r"caf\\udce9' has bytes that are not utf-8 text\n  Use a name in UTF-8\."):
        arguments.parse(["seed=1", "hydra.run.dir=outputs/caf\udce9"])


@pytest.mark.parametrize("line", ["+hooks.mine.api_key=***", "tracking_uri=http://me:***@host"])
def test_a_masked_secret_is_not_a_value(line: str) -> None:
    """It was copied from what hydraloop has printed, such as the command that resumes a sweep."""
    with pytest.raises(UserError, match="its value is a secret") as caught:
        arguments.read(["seed=1", line])
    assert caught.value.remedy == "Write its value, not ***."
    assert caught.value.key == line.partition("=")[0].lstrip("+")


def test_flags_that_say_where_the_config_is() -> None:
    args = arguments.read(["-cn", "other", "seed=1", "--config-dir", "my configs", "-m"])
    assert args.config_flags == ["--config-name=other", "--config-dir=my configs"]


@pytest.mark.parametrize(
    "line",
    [
        "-m hooks=ema,profiler",
        "--multi hooks=ema,profiler",
        "hooks=ema,profiler -m",
        "hydra.mode=MULTIRUN hooks=ema,profiler",
    ],
)
def test_with_a_sweep_a_comma_sweeps(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with composer() as opened:
        checked = check_command(arguments.read(line.split()), opened)
    assert isinstance(checked, check_sweep.SweepDraft)
    assert checked.jobs.swept[0] == "hooks"
    assert "read as a list" not in capsys.readouterr().err

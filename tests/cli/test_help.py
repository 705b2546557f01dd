"""`--help` names everything on one screen, and explains one group, option or key with its type, default and reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hydraloop.commands.parser import COMMANDS, listed_names
from hydraloop.config import arguments
from hydraloop.config.compose import opened
from hydraloop.config.help import show_help
from hydraloop.errors import UserError
from hydraloop.files import environment
from hydraloop.safety.allowlist import ALLOWLIST, IN_MAIN
from hydraloop.schemas import stored
from hydraloop.schemas.selected_hooks import HOOKS_BY_USE
from tests.e2e.projects import Project

MINE = '''
raise RuntimeError("the help runs no code of a project")

class Mine(Hook):
    """Counts things. And more
    of it.
    """
    def __init__(self, every: "int | None" = None, *, names: list[str], rate=0.5) -> None:
        """
        Args:
            every: iterations between two calls.
        """
'''
Help = Callable[..., str]


@pytest.fixture
def help_of(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Help:
    """Returns the help of the repository's project with an own hook, `hooks.mine`."""
    monkeypatch.setattr(environment, "command", lambda: ["python", "train.py"])
    project = Project.make(tmp_path / "project")
    project.write("hook.py", MINE)
    project.write("conf/hooks/mine.yaml", "# @package hooks.mine\n_target_: hook.Mine\nrate: 2\n")
    project.write(
        "conf/model/other.yaml",
        "# @package task.model\n_target_: timm.create_model\nmodel_name: vit\napi_key: sesame\n",
    )

    def text(*names: str, overrides: tuple[str, ...] = ()) -> str:
        with ALLOWLIST.trusting(project.path, [], IN_MAIN), opened(project.path / "conf", "config") as composer:
            show_help(arguments.read([*names, *overrides]), composer, listed_names())
        return capsys.readouterr().out

    return text


def test_one_screen_names_all_groups_and_commands(help_of: Help) -> None:
    text = help_of()
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 80
    for group in ("data", "debug", "default_hooks", "hooks", "model", "optimizer", "precision", "scheduler", "task"):
        assert f"\n  {group:<14} " in text
    for part in ("usage: python train.py", "--dry-run", "hooks.ema, optimizer.lr", *COMMANDS):
        assert part in text, part


@pytest.mark.parametrize(
    ("name", "overrides", "parts"),
    [
        ("hooks", (), ["\n  ema                  Averages the weights", "\n  mine                 Counts things\n"]),
        ("hooks.ema", (), ["hooks=ema: Averages", "\n  momentum=0.0002              float. Share of the new weights"]),
        ("hooks.ema.momentum", (), ["hooks.ema.momentum=0.0002\n  float. Share of the new weights"]),
        ("hooks.ema.momentum", ("hooks=[ema]", "hooks.ema.momentum=0.5"), ["=0.5\n  float, 0.0002 by default. Share"]),
        ("optimizer.lr", (), ["optimizer.lr=0.001\n  float. Learning rate, above 0."]),
        (
            "optimizer.lr",
            ("optimizer=sgd",),
            ["optimizer.lr=0.05\n  float. Learning rate, above 0. 0.05 with momentum"],
        ),
        ("seed", (), ["seed=0\n  int. Seed of every random number generator."]),
        ("engine", (), ["\n  max_epochs=20", "int. Epochs to train.", "\n  max_iters=null", "int or null. Iterations"]),
        ("data.loader.batch_size", (), ["data.loader.batch_size=64\n  int. Samples per batch"]),
        ("data.digits", (), ["data.train.<option>, options of hydraloop.data.Digits\n", "split=train"]),
        ("experiment.spirals", (), ["a custom model and a custom data set", "- override /data: spirals"]),
        ("task.loss", (), ["options of torch.nn.CrossEntropyLoss\n  See: python -m pydoc torch.nn.CrossEntropyLoss\n"]),
        ("model.other", (), ["See: python -m pydoc timm.create_model", "model_name=vit", "api_key=***"]),
    ],
)
def test_one_thing_with_its_type_default_and_reason(
    name: str, overrides: tuple[str, ...], parts: list[str], help_of: Help
) -> None:
    text = help_of(name, overrides=overrides)
    for part in parts:
        assert part in text, text
    assert all(command in text for command in COMMANDS)


def test_hooks_are_listed_in_the_order_of_use(help_of: Help) -> None:
    """The project's first; each built-in hook has a place."""
    listed = re.findall(r"^ (?: ([a-z_]+) |([A-Z].*))", help_of("hooks"), re.M)
    assert [title for _, title in listed if title] == ["This project", *HOOKS_BY_USE]
    names = [name for name, _ in listed if name]
    assert names[:3] == ["mine", "weight_norm", "ema"]
    assert sorted(names[2:]) == sorted(name for name, _ in stored("hooks"))


def test_an_own_hook_has_its_docstring_and_the_names_of_its_arguments_and_no_code_of_it_runs(help_of: Help) -> None:
    text = help_of("hooks.mine")
    assert "hooks=mine: Counts things. And more\n\nhooks.mine.<option>, options of hook.Mine\n" in text
    for row in ("every=…", "names=…", "rate=2"):
        assert f"\n  {row}\n" in text, text
    assert "\n  priority=null                int or str or null. When the hook" in text
    assert help_of("hooks.mine.every").startswith("hooks.mine.every=…\n")


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("hooks.emaa", "hooks.ema"),
        ("lr", "optimizer.lr"),
        ("optimizr", "optimizer"),
        ("engine.max_epoch", "engine.max_epochs"),
    ],
)
def test_an_unknown_name_is_one_message_with_close_names(name: str, close: str, help_of: Help) -> None:
    with pytest.raises(
        UserError, match=f"^{name}: there is no group, option or key of this name\n  Did you mean {close}[?]"
    ):
        help_of(name)
    with pytest.raises(UserError, match="--help names the groups"):
        help_of("qqqqqqqqq")


def test_a_byte_order_mark_changes_nothing(help_of: Help, tmp_path: Path) -> None:
    before = help_of("hooks.mine")
    for file in ("hook.py", "conf/hooks/mine.yaml"):
        path = tmp_path / "project" / file
        path.write_text(path.read_text("utf-8"), "utf-8-sig")
    assert help_of("hooks.mine") == before


def test_a_broken_file_is_listed_and_is_one_message(help_of: Help, tmp_path: Path) -> None:
    (tmp_path / "project" / "hook.py").write_text("class Mine(:\n")
    assert "\n  mine                 from the config folder\n" in help_of("hooks")
    for name, text in (("broken", "a: ["), ("listed", "[1]")):
        (tmp_path / "project" / "conf" / "hooks" / f"{name}.yaml").write_text(text)
    assert "\n  broken               from the config folder\n" in help_of("hooks")
    with pytest.raises(UserError, match=r"broken\.yaml"):
        help_of("hooks.broken")
    with pytest.raises(UserError, match=r"^hooks/listed\.yaml: it is not a mapping"):
        help_of("hooks.listed")


def test_every_help_lists_the_commands(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    for line in (
        "train.py -h hooks",
        "-m hydraloop --help",
        "-m hydraloop evaluate --help",
        "-m hydraloop resume --help",
    ):
        done = project.python(*line.split())
        assert done.code == 0, done.text
        assert all(command in done.out for command in ("predict", "results", "sync")), line

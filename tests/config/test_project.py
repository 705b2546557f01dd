"""`hydraloop/project` in a defaults list: a project's config file names only what differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hydraloop.config import arguments, checks
from hydraloop.config.compose import Composer, opened
from hydraloop.errors import UserError
from hydraloop.files.changes import resumed
from hydraloop.schemas.root import DEFAULT_HOOKS
from hydraloop.sweeps import check_sweep
from tests.config.composed import job

LONG = f"""
defaults:
  - hydraloop
  - data: base
  - task: classification
  - model: null
  - optimizer: adamw
  - scheduler: cosine
  - precision: fp32
  - default_hooks: [{", ".join(DEFAULT_HOOKS).replace("checkpoint", "last_and_best")}]
  - hooks: []
  - _self_
  - experiment: null
experiment_name: project
"""
SHORT = "defaults: [hydraloop/project, _self_, experiment: null]\n"
OWN = "task: {model: {_target_: torch.nn.Linear, in_features: 2, out_features: 3}}\n"


@contextmanager
def project(folder: Path, config: str, **files: str) -> Iterator[Composer]:
    """A composer for a project with these files in its conf/: `experiment_mine` is experiment/mine.yaml."""
    for name, text in {"config": config, **files}.items():
        path = folder / f"{name.replace('_', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    with opened(folder, "config") as composer:
        yield composer


def composed(folder: Path, config: str, lines: Sequence[str] = (), **files: str) -> Any:
    """The config of a run, as a plain container."""
    with project(folder, config, **files) as composer:
        return OmegaConf.to_container(job(arguments.with_hook_lists(list(lines))[0], composer))


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["task=regression", "data=digits", "hooks=ema,freeze", "optimizer=sgd", "scheduler=[linear,cosine]"],
        ["experiment=mine", "default_hooks=[logger]", "optimizer.lr=0.5"],
    ],
    ids=" ".join,
)
def test_every_group_has_the_default_that_a_long_list_names(lines: list[str], tmp_path: Path) -> None:
    mine = "# @package _global_\ndefaults: [override /task: regression]\nengine: {max_epochs: 7}\n"
    short, long = (composed(tmp_path, head + OWN, lines, experiment_mine=mine) for head in (SHORT, LONG))
    assert short == long
    assert short["task"]["model"]["_target_"] == "torch.nn.Linear"
    assert not lines or short["task"]["_target_"].endswith("Regression")


def test_a_file_names_what_differs(tmp_path: Path) -> None:
    differs = "defaults: [hydraloop/project, _self_, override task: regression, override /model: mlp]\nseed: 3\n"
    cfg = composed(tmp_path, differs)
    assert cfg["task"]["model"]["_target_"] == "hydraloop.models.MLP"
    assert [*cfg["task"]["metrics"]] == ["mae"]
    assert [*cfg["default_hooks"]] == DEFAULT_HOOKS
    checkpoint = cfg["default_hooks"]["checkpoint"]
    assert (checkpoint["max_keep_ckpts"], checkpoint["save_best"], checkpoint["min_time"]) == (1, "auto", "10s")
    assert (cfg["seed"], cfg["hooks"]) == (3, {})


def test_a_typed_selection_drops_the_values_of_what_it_does_not_select(tmp_path: Path) -> None:
    selected = "defaults: [hydraloop/project, override scheduler: [linear, cosine], override hooks: [ema], _self_]\n"
    values = "scheduler: {linear: {end: 20}, cosine: {begin: 20}}\nhooks: {ema: {momentum: 0.5}}\n"
    cfg = composed(tmp_path, selected + values + OWN, ["scheduler=warmup_cosine", "hooks=[]"])
    assert ([*cfg["scheduler"]], cfg["hooks"]) == (["warmup_cosine"], {})
    assert composed(tmp_path, selected + values + OWN, ["scheduler=linear"])["scheduler"]["linear"]["end"] == 20
    with project(tmp_path, selected + values + OWN) as composer:
        sweep = check_sweep.check(arguments.read(["-m", "hooks=[],[ema]", "data=digits"]), composer)
        assert [[*sweep.grid.compose(lines).hooks] for lines in sweep.jobs.listed] == [[], ["ema"]]
        for wrong in (["hooks=[profiler]", "hooks.ema.momentum=0.1"], ["hooks=[]", "+hooks.emaa.momentum=0.1"]):
            with pytest.raises(UserError, match="is not a hook"):
                checks.check_run(arguments.typed(wrong), composer, trains=False)


NUMBERED = SHORT + OWN.replace("3", '"${my.num_classes}"') + "my: {num_classes: 3}\n"


def test_own_keys_are_options_of_the_run(tmp_path: Path) -> None:
    """For interpolation; they are changed and swept without a +, also by an experiment, and have no type."""
    mine = "# @package _global_\nmy: {num_classes: 5}\n"
    lines = {"": 3, "my.num_classes=20": 20, "experiment=mine": 5, "experiment=mine my.num_classes=7": 7}
    for line, expected in lines.items():
        cfg = composed(tmp_path, NUMBERED, line.split(), experiment_mine=mine)
        assert cfg["my"]["num_classes"] == expected
        assert cfg["task"]["model"]["out_features"] == "${my.num_classes}"
    with project(tmp_path, NUMBERED) as composer:
        sweep = check_sweep.check(arguments.read(["-m", "my.num_classes=10,20", "data=digits"]), composer)
        jobs = [sweep.grid.compose(lines) for lines in sweep.jobs.listed]
    assert [cfg.task.model.out_features for cfg in jobs] == [10, 20]


TYPED = {
    "my.num_clases=20": "my.num_clases: there is no such key\n  Did you mean my.num_classes?",
    "num_classes=20": "num_classes: there is no such key\n  Did you mean my.num_classes?",
    "my.other=1": "my.other: there is no such key\n",
    "+x=1": "x: there is no such key\n  A key of your own is added under my: +my.x=1",
    "++x.y=[a, b]": "x: there is no such key\n  A key of your own is added under my: '++my.x.y=[a, b]'",
    "+lr=3": "lr: there is no such key\n  Did you mean optimizer.lr? A key of your own is added under my: +my.lr=3",
}


def test_the_command_line_takes_the_keys_that_the_files_have(tmp_path: Path) -> None:
    with project(tmp_path, NUMBERED) as composer:
        for line, message in TYPED.items():
            with pytest.raises(UserError) as caught:
                job(arguments.with_hook_lists([line])[0], composer)
            assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"config": "num_classes: 10"},
            "num_classes: there is no such key (config.yaml)\n"
            "  A key of your own stands under my: my: {num_classes: …}, used as ${my.num_classes}",
        ),
        (
            {"config": "lr: 3"},
            "lr: there is no such key (config.yaml)\n  Did you mean optimizer.lr? A key of your own ",
        ),
        ({"config": "sed: 1"}, "sed: there is no such key (config.yaml)\n  Did you mean seed? A key of your own "),
        (
            {"config": "model: mlp"},
            "model: there is no such key (config.yaml)\n  An option is selected in the defaults list: "
            "- override /model: mlp",
        ),
        (
            {"config": "backbone: small"},
            "backbone: there is no such key (config.yaml)\n  An option is selected in the "
            "defaults list: - /backbone: small",
        ),
        (
            {"line": "+experiment=mine", "experiment_mine": "# @package _global_\nfold: 0"},
            "fold: there is no such key (experiment/mine.yaml)\n  A key of your own stands under my: my: {fold: …}",
        ),
        (
            {"line": "+experiment=mine", "experiment_mine": "seed: 0"},
            "experiment: the keys of experiment/mine.yaml have "
            "no place\n  Begin the file with the line, before any comment: # @package _global_",
        ),
        (
            {"line": "model=mine", "model_mine": "_target_: a.B"},
            "model: the keys of model/mine.yaml have no place\n  "
            "Begin the file with the line, before any comment: # @package task.model",
        ),
        (
            {"line": "+backbone=small"},
            "backbone: the keys of backbone/small.yaml have no place\n  Begin the file with "
            "the line, before any comment: # @package my.backbone",
        ),
    ],
)
def test_a_key_at_the_top_of_a_file_that_is_not_an_option_is_one_message(
    files: dict[str, str], message: str, tmp_path: Path
) -> None:
    line = files.pop("line", None)
    config = SHORT.replace(", experiment: null", "") + files.pop("config", "") + "\n"
    with pytest.raises(UserError) as caught:
        composed(tmp_path, config, [line] if line else [], **{"backbone_small": "width: 3\n", **files})
    assert message in str(caught.value)


def test_a_group_of_the_project_is_used_below_my(tmp_path: Path) -> None:
    head = SHORT.replace("]", ", backbone: small]") + OWN.replace("3", '"${my.backbone.width}"')
    small = "# @package my.backbone\nwidth: 3\n"
    cfg = composed(tmp_path, head, ["+my.tags=[a]", "my.backbone.width=4"], backbone_small=small)
    assert cfg["my"] == {"backbone": {"width": 4}, "tags": ["a"]}


def test_a_resumed_run_reports_the_change_of_an_own_key(tmp_path: Path) -> None:
    metas = []
    for line in ("my.num_classes=3", "my.num_classes=20"):
        with project(tmp_path, NUMBERED) as composer:
            metas.append({"config": OmegaConf.to_yaml(job([line], composer))})
    assert "my.num_classes: 3 -> 20" in resumed(*metas)


def test_an_experiment_that_is_not_in_the_defaults_list_overrides_the_file(tmp_path: Path) -> None:
    head, mine = SHORT.replace(", experiment: null", ""), "# @package _global_\nseed: 5\n"
    with pytest.raises(UserError) as caught:
        composed(tmp_path, f"{head}{OWN}seed: 3\n", ["experiment=mine"], experiment_mine=mine)
    assert str(caught.value).endswith("write a +: +experiment=mine")
    for defaults, lines in ((head, ["+experiment=mine"]), (head.replace("]", ", experiment: mine]"), [])):
        assert composed(tmp_path, f"{defaults}{OWN}seed: 3\n", lines)["seed"] == 5


def test_an_experiment_replaces_the_data_of_the_file(tmp_path: Path) -> None:
    """Its data set has other arguments, and the loader is still that of the file."""
    mine = "# @package _global_\ndefaults: [/hydraloop/no_data, _self_]\ndata: {train: {_target_: b.Fold, fold: 0}}\n"
    own = "data: {train: {_target_: a.Points, samples: 9}, test: {_target_: a.Points}, loader: {batch_size: 3}}\n"
    for head in (SHORT + own, LONG.replace("base", "digits") + "data: {loader: {batch_size: 3}}\n"):
        found = composed(tmp_path, head + OWN, ["experiment=mine"], experiment_mine=mine)["data"]
        assert found["train"] == {"_target_": "b.Fold", "fold": 0}
        assert (found["val"], found["test"], found["loader"]["batch_size"]) == (None, None, 3)

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig

from hydraloop.cli import arguments
from hydraloop.cli import compose as composing
from hydraloop.errors import UserError
from hydraloop.validate import hydra_config
from tests.config.composed import composer


def jobs(*typed: str) -> list[list[str]]:
    return list(composing.jobs(arguments.parse(typed)))


def test_a_line_without_a_sweep_is_one_job() -> None:
    assert jobs("seed=1", "hooks=[ema,profiler]", "~default_hooks.logger") == [
        ["seed=1", "hooks=[ema,profiler]", "~default_hooks.logger"]
    ]
    assert jobs() == [[]]


def test_axes_are_multiplied_the_last_one_fastest() -> None:
    assert jobs("seed=1,2", "engine.test=true", "hooks=[],[ema]") == [
        ["seed=1", "engine.test=true", "hooks=[]"],
        ["seed=1", "engine.test=true", "hooks=[ema]"],
        ["seed=2", "engine.test=true", "hooks=[]"],
        ["seed=2", "engine.test=true", "hooks=[ema]"],
    ]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("hooks=ema,profiler", ["hooks=ema", "hooks=profiler"]),
        ("+hooks=ema,profiler", ["+hooks=ema", "+hooks=profiler"]),
        ("seed=range(1,4)", ["seed=1", "seed=2", "seed=3"]),
        ("seed=choice(4,2)", ["seed=4", "seed=2"]),
        ("seed=sort(4,2)", ["seed=2", "seed=4"]),
        ("name='a,b','c'", ["name='a,b'", "name='c'"]),
    ],
)
def test_what_stands_for_several_values(typed: str, expected: list[str]) -> None:
    assert [line for (line,) in jobs(typed)] == expected


def test_the_same_key_twice_counts_once_the_last_one_winning() -> None:
    assert jobs("seed=1,2", "seed=3") == [["seed=3"]]


def test_a_sweep_without_an_end_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        jobs("optimizer.lr=interval(0,1)")
    assert caught.value.key == "optimizer.lr"
    assert "List its values" in str(caught.value.remedy)


def test_a_glob_without_options_is_refused() -> None:
    with composer(), pytest.raises(UserError) as caught:
        jobs("optimizer.lr=glob(*)")
    assert caught.value.key == "optimizer.lr"
    assert "has no values" in str(caught.value)


def test_the_axes_of_a_config_file_are_swept_too(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "defaults: [hydraloop, _self_]\nhydra: {sweeper: {params: {seed: '1,2', experiment_name: x}}}\n"
    )
    with composing.opened(tmp_path, "config") as opened:
        swept = composing.swept(opened.compose([]), arguments.parse(["seed=5,6"]))
    assert list(composing.jobs(swept)) == [["seed=5", "experiment_name=x"], ["seed=6", "experiment_name=x"]]


def test_a_missing_folder_is_named_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught, composing.opened(tmp_path / "nope", "config"):
        pass
    assert caught.value.key == "--config-path"
    with pytest.raises(UserError) as caught, composing.opened(tmp_path, "config", tmp_path / "nope"):
        pass
    assert caught.value.key == "--config-dir"


def test_the_groups_are_the_projects_and_ours_not_hydras() -> None:
    with composer() as opened:
        groups = opened.groups()
        assert {"data", "experiment", "hooks", "default_hooks", "model"} <= set(groups)
        assert not {"hydra", "hydraloop"} & set(groups)
        hooks = opened.options("hooks")
        assert {"ema", "profiler", "weight_norm"} <= set(hooks)
        assert hooks == sorted(hooks)
        assert opened.is_group("hooks")
        assert not opened.is_group("engine")


def test_an_additional_folder_comes_before_the_projects_own(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 7\n")
    folder = Path(__file__).resolve().parents[2] / "conf"
    with composing.opened(folder, "config", tmp_path) as opened:
        assert opened.compose(["experiment=mine"]).seed == 7


def test_the_id_of_a_run_is_the_same_all_over_one_config_and_another_in_the_next() -> None:
    with composer() as opened:
        first, second = opened.compose(["experiment_name=${run_id:}"]), opened.compose([])
        with hydra_config(first):
            assert first.hydra.run.dir.endswith(first.experiment_name)
            assert first.hydra.run.dir == first.hydra.run.dir
        assert first.hydra.run.dir != second.hydra.run.dir
    assert not HydraConfig.initialized()

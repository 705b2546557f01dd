from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig

from hydraloop.config import compose as composing
from hydraloop.config.checks import hydra_config
from hydraloop.errors import UserError
from tests.config.composed import composer


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


def test_a_working_directory_whose_name_is_not_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=r"udce9' has bytes that are not utf-8 text"), composer():
        pass


@pytest.mark.parametrize("place", ["command-line", "file://"])
def test_a_byte_order_mark_does_not_hide_the_package_of_a_file(place: str, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("defaults: [hydraloop/project, _self_]\n", "utf-8-sig")
    folder = tmp_path / "more"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 7\n", "utf-8-sig")
    search = [] if place == "command-line" else [f"hydra.searchpath=[file://{folder}]"]
    with composing.opened(tmp_path / "conf", "config", None if search else folder) as opened:
        assert opened.compose(["+experiment=mine", *search]).seed == 7
        if not search:
            assert opened.option("experiment", "mine")[1] == "_global_"
    sys.modules.pop("my_configs", None)


def test_the_id_of_a_run_is_the_same_all_over_one_config_and_another_in_the_next() -> None:
    with composer() as opened:
        first, second = opened.compose(["experiment_name=${run_id:}"]), opened.compose([])
        with hydra_config(first):
            assert first.hydra.run.dir.endswith(first.experiment_name)
            assert first.hydra.run.dir == first.hydra.run.dir
        assert first.hydra.run.dir != second.hydra.run.dir
    assert not HydraConfig.initialized()

"""`hydraloop.load`: the engine of a finished run, which writes nothing."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import hydraloop
from hydraloop.errors import UserError
from hydraloop.launch.load_run import checkpoint_of
from hydraloop.tasks import Classification
from tests.config.composed import REPOSITORY

OPTIONS = (
    *("engine.device=cpu", "engine.max_epochs=2", "engine.limit_train_batches=4", "hooks=[ema,tta]"),
    *("default_hooks.checkpoint.save_best=loss", "hooks.ema.momentum=0.1", "default_hooks.progress=null"),
)


@cache
def trained(parent: Path, *lines: str) -> Path:
    """Train the digits for two short epochs."""
    run_dir = parent / f"run{abs(hash(lines))}"
    hydraloop.build(hydraloop.compose([*OPTIONS, *lines], folder=REPOSITORY), run_dir=run_dir).train()
    return run_dir


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def run(runs: Path) -> Path:
    return trained(runs)


def files(folder: Path) -> dict[str, int]:
    """Each file and folder with the time of its last change."""
    return {str(path): path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}


def result(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    return found


def error(run_dir: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        hydraloop.load(run_dir, **options)
    return str(caught.value)


def changed(run_dir: Path, **values: Any) -> None:
    path = run_dir / ".hydra" / "config.yaml"
    cfg = OmegaConf.load(path)
    for key, value in values.items():
        OmegaConf.update(cfg, key.replace("__", "."), value)
    OmegaConf.save(cfg, path)


def test_a_loaded_run_has_the_metrics_of_the_run_and_writes_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With averaged weights, the best checkpoint and an augmented test, from another folder."""
    monkeypatch.chdir(tmp_path)
    before = files(run)
    engine = hydraloop.load(run, splits=["val", "test"])
    assert engine.test() == result(run)["test_metrics"]
    last = hydraloop.load(run, checkpoint="last", splits=["val"])
    assert last.validate() == result(run)["val_metrics"]
    assert last.progress.iteration == 8
    with pytest.raises(UserError, match="there is no optimizer") as caught:
        last.train()
    assert "load_from" in str(caught.value)
    assert files(run) == before
    assert files(tmp_path).keys() == {str(tmp_path)}


class Drawing(Classification):
    """Draws random numbers in evaluations."""

    def evaluate(self, batch: Any) -> dict[str, Any]:
        images, classes = batch
        return super().evaluate((images + torch.rand_like(images), classes))


def test_an_evaluation_that_draws_random_numbers_equals_that_of_the_run(runs: Path) -> None:
    drawing = trained(runs, f"task._target_={__name__}.Drawing")
    engine = hydraloop.load(drawing, splits=["test", "val"], folder=REPOSITORY)
    torch.rand(3)
    assert engine.test() == result(drawing)["test_metrics"]
    last = hydraloop.load(drawing, checkpoint="last", splits=["val"], folder=REPOSITORY)
    assert last.validate() == result(drawing)["val_metrics"]


def test_a_model_is_loaded_without_its_data(run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(run, tmp_path / "moved")
    changed(moved, data__train={"_target_": "no.such.Data"}, data__test={"_target_": "no.such.Data"})
    engine = hydraloop.load(moved)
    assert engine.loaders.by_key() == {}
    raw = hydraloop.load(moved, overrides=["weights=raw"])
    assert not torch.equal(next(engine.model.parameters()), next(raw.model.parameters()))
    with pytest.raises(UserError, match=r"data\.test") as caught:
        engine.test()
    assert "splits=['test']" in str(caught.value)


def test_the_run_may_have_been_moved_and_a_file_is_named_by_its_name(run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(run, tmp_path / "moved")
    best = Path(result(run)["best"]["checkpoint"]).name
    named = hydraloop.load(moved, checkpoint=best)
    for one, other in zip(hydraloop.load(moved).model.parameters(), named.model.parameters(), strict=True):
        assert torch.equal(one, other)
    (moved / "checkpoints" / best).unlink()
    assert hydraloop.load(moved, checkpoint="epoch_1.pth").progress.epoch == 1


def test_overrides_reach_interpolations_and_those_that_do_not_resolve_have_the_values_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLASSES", "10")
    OmegaConf.register_new_resolver("twice", lambda number: 2 * number)
    cfg = hydraloop.compose([*OPTIONS, "seed=7"], folder=REPOSITORY)
    OmegaConf.update(cfg, "task.model.num_classes", "${oc.decode:${oc.env:CLASSES}}")
    OmegaConf.update(cfg, "data.loader.batch_size", "${twice:16}")
    OmegaConf.update(cfg, "data.loader.eval_batch_size", "${seed}")
    hydraloop.build(cfg, run_dir=tmp_path).train()
    OmegaConf.clear_resolver("twice")
    monkeypatch.delenv("CLASSES")
    engine = hydraloop.load(tmp_path, splits=["train", "test"], overrides=["seed=5"])
    assert (engine.loaders.train.batch_size, engine.loaders.test.batch_size) == (32, 5)  # type: ignore[union-attr]


def test_a_run_may_have_keys_of_its_own(runs: Path) -> None:
    assert hydraloop.load(trained(runs, "+my.mine={width:3}", "+my.mine_too=4")).checkpoints.loaded


def test_a_run_that_was_killed_has_its_best_weights_too(run: Path, tmp_path: Path) -> None:
    expected = Path(result(run)["best"]["checkpoint"]).name
    killed = Path(shutil.copytree(run, tmp_path / "killed"))
    (killed / "result.json").unlink()
    assert checkpoint_of(killed, "best").name == expected
    for unreadable in ("", "{}"):
        (killed / "result.json").write_text(unreadable)
        assert checkpoint_of(killed, "best").name == expected
    shutil.copy(killed / "checkpoints" / expected, killed / "checkpoints" / "best_accuracy_epoch_1.pth")
    with pytest.raises(UserError, match=r"has several best checkpoints: .*best_accuracy_epoch_1.pth"):
        checkpoint_of(killed, "best")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"overrides": ["data=cifar"]}, "data: an option of a group cannot be selected"),
        ({"overrides": ["task.mdel=3"]}, "Did you mean task.model?"),
        ({"overrides": ["engine.threads=many"]}, "engine.threads: Value 'many'"),
        ({"overrides": ["data.loader.batch_size=abc"]}, "to Integer\n  Try data.loader.batch_size=64."),
        ({"overrides": ["~hooks"]}, "hooks: an option of a group cannot be selected"),
        ({"overrides": ["task.model.width=abc"]}, "task.model: SmallCNN refuses its options"),
        ({"overrides": "engine.max_epoch=3"}, "engine.max_epoch: there is no such key"),
        ({"splits": ["tset"]}, "splits: 'tset' is not a split\n  Use train, val or test."),
        ({"splits": "test,val", "folder": "."}, "splits: 'test,val' is not a split\n  Use train, val or test."),
        ({"loaders": {"tset": []}}, "loaders: 'tset' is not a split\n  Use train, val or test."),
    ],
)
def test_what_does_not_fit_the_run(run: Path, options: dict[str, Any], expected: str) -> None:
    assert expected in error(run, **options)


def test_a_config_of_another_version(run: Path, tmp_path: Path) -> None:
    """An option that is new has its default; one that is gone is an error."""
    moved = shutil.copytree(run, tmp_path / "moved")
    path = moved / ".hydra" / "config.yaml"
    cfg = OmegaConf.load(path)
    del cfg.engine["prefetch"]
    OmegaConf.save(cfg, path)
    hydraloop.load(moved)
    changed(moved, engine__old_option=1)
    said = error(moved)
    assert said.startswith("engine.old_option: the config of")
    assert "does not fit this version" in said


@pytest.mark.parametrize("place", ["inside", "as the working directory"])
def test_a_run_directory_grants_no_trust(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Also if it is a package in the trusted working directory."""
    moved = shutil.copytree(run, tmp_path / "received")
    touched = tmp_path / "executed"
    code = f"import pathlib, torch\npathlib.Path({str(touched)!r}).touch()\nclass Model(torch.nn.Identity): pass\n"
    for name in ("__init__.py", "evil_model.py"):
        (moved / name).write_text(code)
    folder = tmp_path if place == "inside" else moved
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    target = "received.evil_model.Model" if place == "inside" else "evil_model.Model"
    changed(moved, task__model={"_target_": target})
    said = error(moved, folder=folder)
    assert f"task.model._target_: a config may not instantiate {target}" in said
    assert not touched.exists()


@pytest.mark.parametrize(
    ("key", "target"), [("task.model", "os.system"), ("data.test", "subprocess.Popen"), ("hooks.ema", "torch.hub.load")]
)
def test_a_hostile_config_executes_nothing(run: Path, tmp_path: Path, key: str, target: str) -> None:
    moved = shutil.copytree(run, tmp_path / "moved")
    changed(moved, **{key.replace(".", "__"): {"_target_": target, "args": "touch executed"}})
    assert f"{key}._target_: a config may not instantiate {target}" in error(moved, splits=["test"])


def test_packages_are_trusted_by_the_call_alone(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_package.py").write_text(
        "from hydraloop.models import SmallCNN\ndef make(**o): return SmallCNN(**o)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    override = ["task.model._target_=their_package.make"]
    assert "their_package" in error(run, overrides=override)
    hydraloop.load(run, overrides=override, trusted=["their_package"])
    assert "their_package" in error(run, overrides=override)


def test_objects_are_used_instead_of_the_config(run: Path) -> None:
    generators = torch.get_rng_state()
    first = hydraloop.load(run, splits=["test"])
    assert torch.equal(torch.get_rng_state(), generators)
    engine = hydraloop.load(run, task=first.task, loaders={"test": first.loaders.test})
    assert engine.task is first.task
    assert engine.test() == first.test()

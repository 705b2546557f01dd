from __future__ import annotations

import copy
import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf, open_dict

import hydraloop
from hydraloop import build
from hydraloop.config.checks import validate
from hydraloop.data.map_style_loader import GlobalBatchLoader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.errors import UserError
from hydraloop.files import integrity
from hydraloop.files.metrics_writer import cuts
from hydraloop.hooks import EMAHook
from hydraloop.launch.build import build as build_engine
from hydraloop.launch.plan import RunPlan
from hydraloop.safety.instantiate import instantiate
from tests.config.composed import REPOSITORY
from tests.marks import slow
from tests.ranks import on_ranks


@cache
def _default() -> DictConfig:
    return hydraloop.compose(["engine.device=cpu"], folder=REPOSITORY)


def composed(*lines: str) -> DictConfig:
    return hydraloop.compose(["engine.device=cpu", *lines], folder=REPOSITORY) if lines else copy.deepcopy(_default())


def changed(cfg: DictConfig, **values: Any) -> DictConfig:
    """Change values without type checks, as in a config that was not composed."""
    with open_dict(cfg):
        for key, value in values.items():
            OmegaConf.update(cfg, key.replace("__", "."), value, merge=False, force_add=True)
    return cfg


def test_an_objective_that_no_validation_reports_ends_a_run_before_it_trains(tmp_path: Path) -> None:
    engine = build(composed("sweep.objectives={los: min, time: min}"), run_dir=tmp_path)
    with pytest.raises(UserError, match=r"sweep\.objectives: there is no metric 'los'\n.*loss"):
        engine.train()
    assert engine.progress.iteration == 0


def test_the_best_validation_of_a_job_is_that_of_the_first_objective(tmp_path: Path) -> None:
    short = ("engine.max_epochs=1", "engine.limit_train_batches=2", "engine.limit_val_batches=1", "engine.test=false")
    lines = ("sweep.objectives={time: min, loss: max, accuracy: max}", "default_hooks.checkpoint.save_best=auto")
    found = build(composed(*lines, *short), run_dir=tmp_path).train()
    assert found.best is not None
    assert (found.best.metric, found.objective and found.objective.rule) == ("loss", "greater")
    assert Path(str(found.best.checkpoint)).name == "best_loss_epoch_1.pth"


def test_a_run_that_begins_again_removes_the_records_of_an_attempt_without_a_checkpoint(tmp_path: Path) -> None:
    records = tmp_path / "metrics.jsonl"
    killed = '{"mode": "train", "epoch": 1, "iteration": 3, "loss": 0.5}\n'
    records.write_text(killed)
    build(composed("resume=auto"), run_dir=tmp_path)
    assert records.read_text() == ""
    records.write_text(killed)
    build_engine(RunPlan(cfg=composed(), run_dir=tmp_path), Distributed())  # of a restart
    assert records.read_text() == ""
    assert cuts(records) == [0, 0]


def test_everything_is_built_from_the_config(tmp_path: Path) -> None:
    engine = build(
        composed("hooks=[ema]", "optimizer=sgd", "scheduler=[linear,cosine]", "seed=3", "engine.accumulate=2"),
        run_dir=tmp_path,
    )
    assert type(engine.task).__name__ == "Classification"
    assert type(engine.model).__name__ == "SmallCNN"
    assert type(engine.optimizer).__name__ == "SGD"
    assert list(engine.run.schedules) == ["linear", "cosine"]
    assert list(engine.hooks)[-1] == "ema"
    assert engine.hooks["ema"].key == "hooks.ema"
    assert engine.hooks["logger"].key == "default_hooks.logger"
    assert (engine.run.seed, engine.stepper.accumulate, engine.run_dir) == (3, 2, tmp_path)
    assert engine.progress.epoch_length == 20


def test_building_twice_gives_the_same_weights_and_changes_no_config(tmp_path: Path) -> None:
    cfg = composed("seed=5")
    before = OmegaConf.to_yaml(cfg)
    first, second = (build(cfg, run_dir=tmp_path / name) for name in ("one", "two"))
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert OmegaConf.to_yaml(cfg) == before
    other_seed = build(composed("seed=6"), run_dir=tmp_path / "three")
    assert not torch.equal(next(first.model.parameters()), next(other_seed.model.parameters()))


def test_every_hook_takes_priority_and_on_error(tmp_path: Path) -> None:
    added = ("+hooks.weight_norm.on_error=disable", "hooks.weight_norm.priority=30")
    engine = build(composed("hooks=[weight_norm]", *added), run_dir=tmp_path)
    assert engine.calls.on_error("weight_norm") == "disable"
    assert [slot.priority for slot in engine.calls.slots if slot.name == "weight_norm"] == [30]


def node(**entries: Any) -> DictConfig:
    return OmegaConf.create(entries)


@pytest.mark.parametrize(
    ("given", "key", "text"),
    [
        (node(_target_="torch.nn.Linear", in_features=1, out_feature=1), "x.out_feature", "Did you mean out_features"),
        (node(_target_="torch.nn.Linear", in_features=1), "x", "missing a required argument: 'out_features'"),
        (node(_target_="torch.nn.Linear", _args_=[1, 2], in_features=1), "x", "multiple values for argument"),
        (node(_target_=["torch.nn.Linear"]), "x._target_", "not the path of a class"),
        (node(_target_=None), "x._target_", "nothing"),
        (node(a=1), "x", "a mapping with _target_"),
        (node(_target_="torch.nn.Dropout", p=5.0), "x", "dropout probability has to be between 0 and 1"),
        (
            node(_target_="torch.nn.Sequential", _args_=[{"_target_": "torch.nn.Linear", "in_features": 1, "foo": 1}]),
            "x._args_[0].foo",
            "takes no argument 'foo'",
        ),
        (None, "x", "a mapping with _target_"),
        (5, "x", "a mapping with _target_"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_the_call(given: Any, key: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        instantiate(given, "x")
    assert caught.value.key == key
    assert text in str(caught.value)


@pytest.mark.parametrize("lines", [["engine.max_epochs=3"], ["engine.max_iters=60"], ["engine.max_iters=50"]])
def test_schedules_know_the_length_of_training(lines: Sequence[str], tmp_path: Path) -> None:
    engine = build(
        composed(*lines, "data.val=null", "data.test=null", "default_hooks=[param_scheduler]"), run_dir=tmp_path
    )
    engine.train()
    steps = engine.progress.optimizer_step
    share = (1 + math.cos(math.pi * (steps - 1) / steps)) / 2  # the last step's stays
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * share)


def test_without_a_run_directory_one_is_made_under_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = build(composed())
    assert engine.run_dir.parts[0] == "outputs"
    assert engine.run_dir.is_dir()


def build_on_a_rank(distributed: Distributed, run_dir: str, *overrides: str) -> str:
    """What building says on a rank."""
    try:
        build(composed(*overrides), run_dir=Path(run_dir), distributed=distributed)
    except UserError as error:
        return str(error)
    return "built"


@pytest.mark.slow
def test_a_hook_with_collectives_may_only_raise_where_there_are_several_ranks(tmp_path: Path) -> None:
    overrides = ("default_hooks.logger.on_error=warn",)
    build(composed(*overrides), run_dir=tmp_path / "one")
    for said in on_ranks(2, build_on_a_rank, str(tmp_path / "two"), *overrides):
        assert said.startswith("default_hooks.logger.on_error: this hook communicates with the other ranks")
        assert "Use raise." in said


def overfitted(distributed: Distributed, run_dir: str) -> list[list[int]]:
    """The samples of three epochs and of the validation on a rank."""
    line = ("engine.overfit_batches=2", "data.loader.batch_size=4", "data.loader.eval_batch_size=3", "precision=bf16")
    engine = build(composed(*line, "engine.max_epochs=2"), run_dir=Path(run_dir), distributed=distributed)
    engine.train()
    train, val = engine.loaders.train, engine.loaders.val
    assert isinstance(train, GlobalBatchLoader)
    assert isinstance(val, GlobalBatchLoader)
    assert engine.loaders.test is None
    found = [sorted(index for batch in range(2) for index in train.indices_at(batch, epoch)) for epoch in range(3)]
    return [*found, [index for batch in range(len(val)) for index in val.indices_at(batch, 0)]]


def test_two_ranks_overfit_the_same_samples(tmp_path: Path) -> None:
    one, other = on_ranks(2, overfitted, str(tmp_path))
    for mine, theirs in zip(one, other, strict=True):
        assert sorted({*mine, *theirs}) == list(range(16))


def join_again(distributed: Distributed) -> str:
    """What a second `build` says that is not given the ranks."""
    try:
        build(composed())
    except UserError as error:
        return str(error)
    return "built"


def test_joining_twice_is_refused() -> None:
    for said in on_ranks(2, join_again):
        assert "hydraloop.build(cfg, distributed=engine.distributed)" in said


def weights_when_built(distributed: Distributed, run_dir: str, *overrides: str) -> tuple[float, float]:
    """Sums of the first and last parameter when `build` returns."""
    engine = build(composed(*overrides), run_dir=Path(run_dir), distributed=distributed)
    parameters = [parameter.detach() for parameter in engine.model.parameters()]
    return float(parameters[0].sum()), float(parameters[-1].sum())


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_load_from_and_init_have_taken_effect_when_build_returns(tmp_path: Path, ranks: int) -> None:
    state = {
        name: torch.full_like(value, 0.5)
        for name, value in instantiate(composed().task.model, "m").state_dict().items()
    }
    torch.save(state, tmp_path / "a.pth")
    first, last = (float(list(state.values())[index].sum()) for index in (0, -1))
    for option, partly in ((f"load_from={tmp_path}/a.pth", False), (f"init.checkpoint={tmp_path}/a.pth", True)):
        overrides = [option, *(["init.exclude=[classifier.*]"] if partly else [])]
        if ranks == 1:
            built = [weights_when_built(Distributed(), str(tmp_path / option[:4]), *overrides)]
        else:
            built = on_ranks(2, weights_when_built, str(tmp_path / option[:4]), *overrides)
        assert {one[0] for one in built} == {first}
        assert len({one[1] for one in built}) == 1, "the same on all ranks"
        assert (built[0][1] == last) is not partly


def bytes_verified(distributed: Distributed, run_dir: str, *overrides: str) -> int:
    """How many bytes of checkpoints this rank compares with their checksums, before a validation."""
    compared = []

    def counted(content: bytes, start: int = 0) -> int:
        compared.append(len(content))
        return zlib.crc32(content, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zipfile, "crc32", counted)
        patch.setattr(integrity, "zlib", SimpleNamespace(crc32=counted))
        cfg = composed("task.model.width=32", "engine.limit_val_batches=1", *overrides)
        build(cfg, run_dir=Path(run_dir), distributed=distributed).validate()
    return sum(compared)


def checkpoint_of(distributed: Distributed, run_dir: str) -> str:
    """The path of a checkpoint after two iterations."""
    cfg = composed("task.model.width=32", "engine.max_iters=2", "engine.test=false")
    engine = build(cfg, run_dir=Path(run_dir), distributed=distributed)
    engine.train()
    return str(engine.checkpoints.last_checkpoint)


@pytest.mark.parametrize(
    ("option", "strategy"),
    [("resume", "ddp"), *(slow(option, "fsdp2") for option in ("resume", "load_from", "init.checkpoint"))],
)
def test_ranks_share_the_verification_of_a_checkpoint(tmp_path: Path, option: str, strategy: str) -> None:
    path = Path(on_ranks(2, checkpoint_of, str(tmp_path / "saved"), strategy=strategy)[0])
    size = sum(file.stat().st_size for file in path.parent.rglob("*") if file.is_file())
    run_dir = str(tmp_path / ("saved" if option == "resume" else "run"))
    told = on_ranks(2, bytes_verified, run_dir, f"{option}={path}", strategy=strategy)
    assert 0.9 * size < sum(told) < 1.3 * size


def test_rules_for_initial_weights_are_typed_without_a_plus(tmp_path: Path) -> None:
    state = instantiate(composed().task.model, "m").state_dict()
    torch.save({f"net.{name}": torch.full_like(value, 0.5) for name, value in state.items()}, tmp_path / "a.pth")
    rules = ["init.prefix=net", "init.mismatched=skip", "task.model.num_classes=7"]
    cfg = composed(f"init.checkpoint={tmp_path}/a.pth", *rules)
    parameters = list(build(cfg, run_dir=tmp_path / "run").model.parameters())
    assert float(parameters[0].detach().mean()) == 0.5
    assert parameters[-1].shape == (7,)


def test_a_resumed_run_does_not_need_its_initial_weights(tmp_path: Path) -> None:
    torch.save(instantiate(composed().task.model, "m").state_dict(), tmp_path / "a.pth")
    options = [f"init.checkpoint={tmp_path}/a.pth", "engine.max_iters=2", "engine.test=false"]
    build(composed(*options), run_dir=tmp_path / "run").train()
    (tmp_path / "a.pth").unlink()
    options[1] = "engine.max_iters=3"
    assert build(composed(*options, f"resume={tmp_path}/run"), run_dir=tmp_path / "run").train().status == "finished"


def ended(run_dir: Path, *overrides: str) -> Engine:
    """Train the spirals with a cosine."""
    cfg = composed("experiment=spirals", "engine.test=false", "engine.val_interval=null", *overrides)
    engine = build(cfg, run_dir=run_dir)
    engine.train()
    assert 0 < engine.optimizer.param_groups[0]["lr"] < 1e-4
    return engine


@pytest.mark.parametrize("batch_size", [8, 32])
def test_a_run_resumed_with_other_batches_inside_an_epoch_ends_its_schedule_with_its_training(
    tmp_path: Path, batch_size: int
) -> None:
    cut = ended(tmp_path, "data.loader.batch_size=16", "engine.max_iters=45").progress
    assert 0 < cut.batch_in_epoch < cut.epoch_length
    engine = ended(tmp_path, f"resume={tmp_path}", f"data.loader.batch_size={batch_size}", "engine.max_epochs=2")
    assert engine.progress.epoch == 2
    cosine: Any = next(iter(engine.run.schedules.values()))
    assert cosine.end == engine.progress.optimizer_step


@pytest.mark.parametrize("own", [None, ":16:8"])
def test_a_deterministic_run_fixes_the_workspace_of_cublas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    """torch refuses matrix products on CUDA without it."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", own or "")
    if own is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    build(composed(), run_dir=tmp_path / "one")
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == own
    try:
        build(composed("engine.deterministic=true"), run_dir=tmp_path / "two")
    finally:
        torch.use_deterministic_algorithms(False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (own or ":4096:8")


def trained_with_objects(distributed: Distributed, run_dir: str) -> tuple[dict[str, float], list[list[float]]]:
    """Train the digits with a finished task, optimizer and hook."""
    cfg = composed("engine.max_epochs=1", "engine.limit_train_batches=4", "default_hooks.checkpoint.save_best=loss")
    task = instantiate(cfg.task, "task")
    model = task.model
    objects: dict[str, Any] = {"task": task, "hooks": {"ema": EMAHook(momentum=0.1)}}
    objects["optimizer"] = {"all": torch.optim.SGD(model.parameters(), lr=0.1)}
    with torch.no_grad():
        model.classifier.weight.add_(distributed.rank)  # rank 0's weights count
    engine = build(cfg, run_dir=Path(run_dir), distributed=distributed, **objects)
    result = engine.train()
    return result.test_metrics, [parameter.flatten().tolist() for parameter in engine.model.parameters()]


def metrics_of(distributed: Distributed, run_dir: str) -> dict[str, float]:
    cfg = composed()
    task = instantiate(cfg.task, "task")
    return hydraloop.load(run_dir, task=task, splits=["test"], distributed=distributed).test()


@pytest.mark.slow
def test_ranks_train_finished_objects_and_a_loaded_run_has_their_metrics(tmp_path: Path) -> None:
    """To the last bit with the same ranks; with one process, up to the order of the sums."""
    first, second = on_ranks(2, trained_with_objects, str(tmp_path))
    assert first == second
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for metrics in on_ranks(2, metrics_of, str(tmp_path)):
        assert metrics == first[0]
    alone = metrics_of(Distributed(), str(tmp_path))
    assert alone["accuracy"] == first[0]["accuracy"]
    assert alone["loss"] == pytest.approx(first[0]["loss"], rel=1e-6)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def sharded_with_objects(distributed: Distributed, run_dir: str) -> tuple[str, str]:
    """What building with FSDP2 says to a finished optimizer, and to a function."""
    cfg = composed("distributed.strategy=fsdp2")
    task = instantiate(cfg.task, "task")
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
    with pytest.raises(UserError) as caught:
        build(cfg, run_dir=Path(run_dir), distributed=distributed, task=task, optimizer=optimizer)
    function = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    engine = build(cfg, run_dir=Path(run_dir), distributed=distributed, optimizer=function)
    return str(caught.value), type(engine.optimizer).__name__


@pytest.mark.slow
def test_fsdp2_makes_the_optimizer_from_a_function(tmp_path: Path) -> None:
    for said, made in on_ranks(2, sharded_with_objects, str(tmp_path), strategy="fsdp2"):
        assert "FSDP2 has replaced the parameters of a finished optimizer" in said
        assert "functools.partial(torch.optim.AdamW, lr=1e-3)" in said
        assert made == "SGD"


# Mistakes that are found without torch, by the command line and by `build` alike. -----------------------------------


def error_of(cfg: DictConfig, **options: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        validate(cfg, **options)
    return caught.value


@pytest.mark.parametrize("name", ["x/y", "x\\y", "x\0y", "x\x1b[2J", "x" * 300])
def test_files_are_named_after_hooks(name: str) -> None:
    cfg = composed()
    with open_dict(cfg):
        cfg.hooks[name] = {"_target_": "x.X"}
    assert "without slashes" in str(error_of(cfg).remedy)


def test_keys_that_are_numbers_are_looked_at() -> None:
    with pytest.raises(UserError, match=r"hooks\.mine"):
        composed("++hooks.mine={every:{0:{a:1}}}")


def test_the_optimizer_of_a_schedule_is_that_of_the_config_only_on_the_command_line() -> None:
    cfg = composed()
    cfg.scheduler.cosine.optimizer = "rest"
    assert error_of(cfg, trains=True).key == "scheduler.cosine.optimizer"
    validate(cfg)  # the optimizers may be finished objects


def test_what_is_right_passes_with_and_without_training_data() -> None:
    validate(composed(), trains=True)
    cfg = composed("data.train=null")
    validate(cfg)
    assert error_of(cfg, trains=True).key == "data.train"


def test_limits_and_times_are_typed_as_on_the_command_line() -> None:
    lines = ("engine.limit_train_batches=1.0", "engine.limit_val_batches=1", "engine.max_time=1:30:00")
    cfg = composed(*lines)
    validate(cfg)
    assert [type(value) for value in (cfg.engine.limit_train_batches, cfg.engine.limit_val_batches)] == [float, int]
    with pytest.raises(UserError, match=r"engine\.limit_val_batches"):
        composed("engine.limit_val_batches=true")


@pytest.mark.parametrize("name", ["", "  "])
def test_an_experiment_has_a_name(name: str) -> None:
    """A tracker would refuse the empty name after the start of the run."""
    cfg = composed()
    cfg.experiment_name = name
    assert error_of(cfg).key == "experiment_name"


def test_nesterov_without_momentum_names_both() -> None:
    """torch's own message names neither option."""
    with pytest.raises(UserError, match=r"optimizer\.nesterov=false") as caught:
        composed("optimizer=sgd", "optimizer.momentum=0")
    assert caught.value.key == "optimizer.nesterov"
    validate(composed("optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=false"))

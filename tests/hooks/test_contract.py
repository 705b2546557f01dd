"""The contract of every hook: its schema, its class and its docstring say the same, and it runs, saves and resumes.

Hooks are collected from `hydraloop.hooks` and from Hydra's ConfigStore, so a new hook is tested automatically.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from torch import nn

import hydraloop
import hydraloop.hooks
from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import ON_ERROR, Hook, Priority
from hydraloop.engine.hook_order import mount_points_of
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run_parts import Settings
from hydraloop.errors import UserError
from hydraloop.hooks.logger import LoggerHook
from hydraloop.optim import Cosine, Schedule
from hydraloop.schemas.selected_hooks import HOOK_CLASSES
from hydraloop.tasks.metrics import Accuracy
from hydraloop.tasks.per_sample import Classification
from hydraloop.tracking.tracker_hook import TrackerHook
from tests.helpers import EngineWithNeededHooks, differences, failing
from tests.hooks.npu import torch_npu
from tests.marks import nightly

REQUIRED: dict[str, dict[str, Any]] = {"freeze": {"modules": ["0", "1"], "epochs": 1}}
"""Options without a default that works for every model."""
VARIANTS = {
    "npu_profiler": {"activity_with_npu": None, "on_trace_ready": "tb_trace"},
    "sync_norm": {"norm_only": True},
}
"""By option that shares its class with another one: the defaults that differ."""


@dataclass(frozen=True)
class Option:
    """An option of a hook group: its name in the config, its schema, the class it builds."""

    group: str
    name: str
    schema: Any
    hook: type[Hook]
    package: str | None

    def make(self) -> Hook:
        """Make the hook with its default options, and with those that it requires."""
        return self.hook(**VARIANTS.get(self.name, {}), **REQUIRED.get(self.name, {}))


def _options() -> list[Option]:
    assert hydraloop.Hook  # importing hydraloop fills the store
    store, found = ConfigStore.instance(), []
    for group in ("default_hooks", "hooks"):
        for file in sorted(store.list(group)):
            node = store.load(f"{group}/{file}")
            module, _, cls = str(node.node["_target_"]).rpartition(".")
            hook = getattr(importlib.import_module(module), cls)
            found.append(Option(group, file.removesuffix(".yaml"), OmegaConf.get_type(node.node), hook, node.package))
    return found


OPTIONS = _options()
each_option = pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
each_hook = pytest.mark.parametrize("cls", [getattr(hydraloop.hooks, name) for name in hydraloop.hooks.__all__])


# What is written about it. -------------------------------------------------------------------------------------------


def test_every_hook_has_an_option_and_every_option_a_hook() -> None:
    exported = {getattr(hydraloop.hooks, name) for name in hydraloop.hooks.__all__}
    assert {option.hook for option in OPTIONS} == exported
    assert len({option.name for option in OPTIONS}) == len(OPTIONS), "a name belongs to one hook in both groups"
    assert len(OPTIONS) >= 10


@each_option
def test_a_dry_run_knows_order_and_mount_points_without_torch(option: Option) -> None:
    facts, hook = HOOK_CLASSES[option.hook.__name__], option.hook
    assert facts["module"] == hook.__module__
    assert facts["priority"] == Priority.of(hook.priority)
    assert facts["mount_points"] == list(mount_points_of(hook.overrides))
    assert facts["runs_after"] == list(hook.runs_after)
    plain = option.schema()
    assert plain.priority is None
    assert plain.on_error == hook.on_error


@each_hook
def test_the_docstring_names_cost_priority_state_and_options(cls: type[Hook]) -> None:
    doc = inspect.cleandoc(cls.__doc__ or "")
    assert len(doc.splitlines()) > 3
    assert re.search(r"\bsync\b", doc), "whether the host waits for the device"
    assert re.search(rf"\b{Priority(Priority.of(cls.priority)).name}\b", doc), "its priority by name"
    assert re.search(r"\b[Ss]tate\b", doc), "whether it has a state"
    if not any(f"`{option.schema.__name__}`" in doc for option in OPTIONS):  # where the options are described
        for argument in inspect.signature(cls).parameters:
            assert re.search(rf"^    {argument}: ", doc, re.M), f"what {argument} is"


@each_hook
def test_the_class_is_one_of_the_engines(cls: type[Hook]) -> None:
    assert issubclass(cls, Hook)
    assert cls.on_error in ON_ERROR
    assert not (cls.collective and cls.on_error != "raise"), (
        "the other ranks would wait for a rank that continues alone"
    )
    assert cls.overrides("state_dict") == (cls.load_state_dict is not Hook.load_state_dict), "both or none"


# What it does. -------------------------------------------------------------------------------------------------------

each_run = pytest.mark.parametrize(
    "option",
    # Each run with a tracker takes seconds. CI has them in the run with all hooks.
    [nightly(option) if option.name in ("mlflow", "tensorboard", "wandb") else option for option in OPTIONS],
    ids=lambda option: option.name,
)
NEEDS_VALIDATION = {"early_stopping"}
"""Options that are an error without a validation."""


@pytest.fixture(autouse=True)
def _npu(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """For `npu_profiler` a stand-in of the package that it needs."""
    if "npu_profiler" not in request.node.name:
        yield
        return
    with torch_npu(tmp_path_factory.mktemp("packages"), monkeypatch):
        yield


@pytest.fixture(autouse=True)
def _nothing_outside(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, trackers write into the working directory; all share one new database."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path_factory.getbasetemp()}/mlflow.db")
    monkeypatch.setenv("WANDB_MODE", "offline")


class Images(InMemoryDataset):
    """With a method for `mode_switch` to call, which has no effect."""

    def set_strong_augmentation(self, on: bool) -> None:
        self.strong = on


def _engine(run_dir: Path, hooks: dict[str, Hook], *, val: bool = True, **settings: Any) -> Engine:
    """A small classification of images `[N, 1, 6, 6]` with a schedule: two epochs of five batches."""
    run_dir.mkdir(exist_ok=True)
    if any(isinstance(hook, TrackerHook) for hook in hooks.values()):  # they send the logger's records
        hooks = {"logger": LoggerHook(), **hooks}
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(18, 1, 6, 6, generator=generator)
    data = Images(images, torch.arange(18) % 2, classes=["even", "odd"])
    loader = build_loader(data, shuffle=False, batch_size=4)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    model.num_classes = 2  # type: ignore[assignment]  # a plain number
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return EngineWithNeededHooks(
        task=Classification(model, nn.CrossEntropyLoss(), {"accuracy": Accuracy()}),
        optimizer=optimizer,
        loaders=Loaders(build_loader(data, shuffle=True, batch_size=4), loader if val else None, loader),
        hooks=hooks,
        schedules={"cosine": Schedule("cosine", Cosine(T_max=10), optimizer)},
        settings=Settings(**{"device": "cpu", "max_epochs": 2, **settings}),
        run_dir=run_dir,
    )


class Saving(Hook):
    """Asks for a checkpoint at each epoch's end."""

    priority = 100

    def after_train_epoch(self, engine: Engine) -> None:
        engine.request_checkpoint(f"saved_{engine.progress.epoch}")


def _ran(engine: Engine) -> None:
    result = engine.train()
    assert (result.status, result.error) == ("finished", None)
    assert engine.progress.epoch == 2
    assert result.test_metrics["accuracy"] >= 0


def _no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    hidden = [text for text in caplog.messages if "failed at" in text or "while closing" in text]
    assert hidden == [], "a hook with on_error=warn would hide its bugs"


def _runs_and_resumes(path: Path, make: Callable[[], dict[str, Hook]]) -> Engine:
    """Train, and train on from the checkpoint of the first epoch. Returns the first engine."""
    torch.manual_seed(0)
    first = _engine(path / "one", {**make(), "saving": Saving()})
    _ran(first)
    _ran(_engine(path / "two", {**make(), "saving": Saving()}, resume=path / "one" / "checkpoints" / "saved_1.pth"))
    return first


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The weights after a run with the hooks that each run has: `sampler_seed`, and `param_scheduler` of a schedule."""
    torch.manual_seed(0)
    alone = _engine(tmp_path_factory.mktemp("alone"), {})
    alone.train()
    return alone.model.state_dict()


@each_run
def test_a_run_finishes_and_resumes_and_its_state_survives_a_file(
    option: Option, tmp_path: Path, caplog: pytest.LogCaptureFixture, unchanged: dict[str, Any]
) -> None:
    """With default options, only some hooks change the weights."""
    engine = _runs_and_resumes(tmp_path, lambda: {option.name: option.make()})
    same = not list(differences(unchanged, engine.model.state_dict()))
    assert same == (option.name not in {"sync_random_size", "freeze"})
    hook = engine.hooks[option.name]
    state = hook.state_dict()
    assert bool(state) == hook.overrides("state_dict"), "after a run there is something in it"
    if state:
        torch.save(state, tmp_path / "state.pth")
        loaded = torch.load(tmp_path / "state.pth", weights_only=True)
        assert list(differences(loaded, state)) == []
        other = option.make()
        _engine(tmp_path / "other", {option.name: other}).calls.before_run()
        other.load_state_dict(loaded)
        if option.name != "checkpoint":  # whose files are in the other run's folder
            assert list(differences(other.state_dict(), state)) == []
    _no_warnings(caplog)


@pytest.mark.slow
def test_a_run_with_all_of_them_finishes_and_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # A process has one profiler, and `npu_profiler` needs a package that only machines with such a device have.
    selected = [option for option in OPTIONS if option.name != "npu_profiler"]
    _runs_and_resumes(tmp_path, lambda: {option.name: option.make() for option in selected})
    _no_warnings(caplog)


@each_run
def test_a_run_without_validation_and_an_evaluation_without_training(
    option: Option, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = _engine(tmp_path / "train", {option.name: option.make()}, val=False)
    if option.name in NEEDS_VALIDATION:
        with pytest.raises(UserError, match=rf"hooks\.{option.name}: "):
            engine.train()
        assert engine.progress.iteration == 0
    else:
        _ran(engine)
    for method in ("validate", "test"):
        metrics: dict[str, float] = getattr(_engine(tmp_path / method, {option.name: option.make()}), method)()
        assert set(metrics) == {"accuracy", "loss"}
    _no_warnings(caplog)


@each_run
def test_an_error_of_another_hook_is_handled(option: Option, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for point in ("before_run", "after_train_iter", "before_val_iter"):
        hooks = {option.name: option.make(), "failing": failing(point, priority=0)}
        with pytest.raises(RuntimeError, match="on purpose"):
            _engine(tmp_path / point, hooks).train()
    _no_warnings(caplog)

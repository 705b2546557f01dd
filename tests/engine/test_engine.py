"""Engine: training, and the end of a run after an error."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.model_preparation import in_eval_mode
from hydraloop.engine.run_parts import Settings
from hydraloop.errors import UserError
from hydraloop.tasks.task import Task
from tests.helpers import EngineWithNeededHooks, Recorder, at, batches, failing, make_engine, tiny_task

# Training. -----------------------------------------------------------------------------------------------------------


def test_training_is_the_hand_written_loop(tmp_path: Path) -> None:
    train = batches(5, last=2)
    engine = make_engine(tmp_path, train=train, max_epochs=3, lr=0.1)
    engine.train()

    model = tiny_task().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for inputs, targets in train:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    for trained, expected in zip(engine.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(trained, expected)


def test_modes_and_gradients_at_each_phase(tmp_path: Path) -> None:
    seen: dict[str, tuple[bool, bool]] = {}

    def look(point: str) -> Hook:
        return at(point, lambda engine: seen.update({point: (engine.model.training, torch.is_grad_enabled())}), nth=0)

    points = ["before_train_iter", "after_train_iter", "before_val_iter", "after_val_epoch", "after_test_iter"]
    engine = make_engine(tmp_path, {point: look(point) for point in points}, val=batches(1), test=batches(1))
    engine.train()
    assert seen == {
        "before_train_iter": (True, True),
        "after_train_iter": (True, True),
        "before_val_iter": (False, False),
        "after_val_epoch": (True, True),
        "after_test_iter": (False, False),
    }
    assert all(parameter.grad is None for parameter in engine.model.parameters())


def test_what_is_no_hook_is_refused(tmp_path: Path) -> None:
    named = Hook()
    named.name = "mine"
    with pytest.raises(UserError, match=r"hooks\.theirs: Hook sets its attribute name"):
        make_engine(tmp_path, {"theirs": named})
    with pytest.raises(UserError, match=r"hooks\.theirs: object is not a Hook"):
        make_engine(tmp_path, {"theirs": object()})  # type: ignore[dict-item]


def test_hooks_know_their_name_and_key(tmp_path: Path) -> None:
    custom, default = Hook(), Hook()
    default.key = "default_hooks.b"  # the builder does this
    make_engine(tmp_path, {"a": custom, "b": default})
    assert (custom.name, custom.key) == ("a", "hooks.a")
    assert (default.name, default.key) == ("b", "default_hooks.b")


# Closing after an error. ---------------------------------------------------------------------------------------------


def test_all_closing_hooks_are_called_even_if_one_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    hooks: dict[str, Hook] = {
        "training": failing("after_train_iter", RuntimeError("the first")),
        "on exception": failing("on_exception", OSError("in on_exception"), priority=0),
        "closing": failing("after_train", ValueError("while closing"), priority=0),
        "end": failing("after_run", KeyError("at the end"), priority=0),
        "recorder": recorder,
    }
    engine = make_engine(tmp_path, hooks)
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="the first") as caught:
        engine.train()
    assert recorder.trace[-3:] == ["on_exception", "after_train", "after_run"]
    assert engine.error is caught.value
    logged = {type(record.exc_info[1]) for record in caplog.records if record.exc_info}
    assert logged == {OSError, ValueError, KeyError}, "the later ones are in the log with their tracebacks"


def test_the_error_is_known_to_the_closing_hooks(tmp_path: Path) -> None:
    error = RuntimeError("on purpose")
    seen: list[BaseException | None] = []
    hooks: dict[str, Hook] = {
        "failing": failing("before_train_iter", error),
        **{
            f"at {point}": at(point, lambda engine: seen.append(engine.error)) for point in ("after_train", "after_run")
        },
    }
    recorder = hooks["recorder"] = Recorder()
    with pytest.raises(RuntimeError):
        make_engine(tmp_path, hooks).train()
    assert seen == [error, error]
    assert dict(recorder.arguments)["on_exception"] == (error,)


def test_an_interrupt_while_closing_does_not_keep_the_others_from_closing(tmp_path: Path) -> None:
    recorder = Recorder()
    hooks: dict[str, Hook] = {"failing": failing("after_train", KeyboardInterrupt()), "recorder": recorder}
    with pytest.raises(KeyboardInterrupt):
        make_engine(tmp_path, hooks).train()
    assert recorder.trace[-3:] == ["on_exception", "after_train", "after_run"]


def test_a_validation_on_its_own_closes_after_an_error(tmp_path: Path) -> None:
    recorder = Recorder()
    engine = make_engine(tmp_path, {"recorder": recorder, "failing": failing("after_val_iter")}, val=batches(1))
    with pytest.raises(RuntimeError):
        engine.validate()
    assert recorder.trace[-2:] == ["on_exception", "after_run"]


# Mistakes. -----------------------------------------------------------------------------------------------------------


class NoLoss(Task):
    def forward(self, batch: Any) -> dict[str, Tensor]:
        return {"logits": self.model(batch[0])}


class NoDict(Task):
    def forward(self, batch: Any) -> Any:
        return self.model(batch[0])


@pytest.mark.parametrize(("cls", "got"), [(NoLoss, "a dict with ['logits']"), (NoDict, "a Tensor")])
def test_a_task_without_a_loss_is_a_clear_message(tmp_path: Path, cls: type[Task], got: str) -> None:
    engine = make_engine(tmp_path, task=cls(nn.Linear(3, 1), nn.MSELoss()))
    with pytest.raises(UserError, match="without a 'loss'") as caught:
        engine.train()
    message = str(caught.value)
    assert f"{cls.__name__}.forward returned {got}" in message
    assert '{"loss": loss}' in message


def test_a_run_directory_that_does_not_exist_is_created(tmp_path: Path) -> None:
    make_engine(tmp_path / "new" / "run").train()
    assert (tmp_path / "new" / "run" / "result.json").exists()


def test_a_run_directory_that_is_a_file_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    engine = make_engine(tmp_path / "file")
    with pytest.raises(FileExistsError):
        engine.train()
    assert engine.progress.iteration == 0


def test_without_training_data_or_with_an_empty_loader(tmp_path: Path) -> None:
    task = tiny_task()
    optimizer = torch.optim.SGD(task.parameters())
    settings = Settings(device="cpu", max_iters=3)
    for loaders, key in ((Loaders(), "data.train"), (Loaders([]), "data.loader.batch_size")):
        with pytest.raises(UserError) as caught:
            EngineWithNeededHooks(
                task=task, optimizer=optimizer, loaders=loaders, settings=settings, run_dir=tmp_path
            ).train()
        assert caught.value.key == key
        assert caught.value.remedy


def test_without_an_optimizer_nothing_is_trained(tmp_path: Path) -> None:
    engine = EngineWithNeededHooks(
        task=tiny_task(), loaders=Loaders(batches(1)), settings=Settings(device="cpu"), run_dir=tmp_path
    )
    with pytest.raises(UserError, match="no optimizer") as caught:
        engine.train()
    assert caught.value.key == "optimizer"


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_a_clear_message(tmp_path: Path, device: str) -> None:
    with pytest.raises(UserError) as caught:
        make_engine(tmp_path, device=device)
    assert caught.value.key == "engine.device"
    assert device in str(caught.value)
    assert re.search(r"Use auto(,| or) cpu", str(caught.value.remedy))  # the second where no accelerator is


class MergedLora(nn.Linear):
    """A linear layer `[N, 3] -> [N, 1]` as in loralib: in eval mode its update is merged into the weight."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.update = nn.Parameter(torch.full((1, 3), 0.1))
        self.merged = False

    def train(self, mode: bool = True) -> MergedLora:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += -self.update.data if mode else self.update.data
            self.merged = not mode
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) if self.merged else super().forward(inputs) + inputs @ self.update.T


class FreezesNorms(nn.Sequential):
    """Keeps its batch norm in eval mode from `train` on, as the backbones of MMDetection with `norm_eval` do."""

    def train(self, mode: bool = True) -> FreezesNorms:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


def _modes(module: nn.Module) -> dict[str, bool]:
    return {name: inner.training for name, inner in module.named_modules()}


def _train(run_dir: Path, model: nn.Sequential, *, seen: list[Any] | None = None, **options: Any) -> None:
    """Train two epochs with validations, one of them inside the first; `seen` gets the modes in each iteration."""
    look = at("before_train_iter", lambda engine: None if seen is None else seen.append(_modes(model)), nth=0)
    settings = {"val_by_epoch": False, "val_interval": 1, "max_epochs": 2, **options}
    make_engine(run_dir, {"look": look}, task=Task(model, nn.MSELoss()), val=batches(1), **settings).train()


def test_a_part_in_eval_mode_stays_so_in_all_epochs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    model[0].eval()
    seen: list[dict[str, bool]] = []
    _train(tmp_path, model, seen=seen)
    assert seen == [{"": True, "0": False, "1": True, "2": True}] * 4
    assert model[0].num_batches_tracked == 0, "the statistics of a frozen batch norm do not move"


def test_a_part_that_training_puts_into_eval_mode_stays_so(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    freeze = at("after_train_iter", lambda engine: engine.model[0].eval())
    make_engine(tmp_path, {"freeze": freeze}, task=Task(model, nn.MSELoss()), val=batches(1), max_epochs=3).train()
    assert _modes(model) == {"": True, "0": False, "1": True}
    assert model[0].num_batches_tracked == 1


def test_a_merged_lora_is_split_again_and_learns_after_an_evaluation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    validated = nn.Sequential(MergedLora())
    plain = copy.deepcopy(validated)
    _train(tmp_path, validated)
    _train(tmp_path, plain, val_interval=None)
    assert not validated[0].merged
    for one, other in zip(validated.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_module_that_freezes_layers_in_its_own_train_does_so_from_the_first_iteration(tmp_path: Path) -> None:
    seen: list[dict[str, bool]] = []
    _train(tmp_path, FreezesNorms(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1)), seen=seen)
    assert seen == [{"": True, "0": False, "1": True, "2": True}] * 4


def test_modes_inside_modules_with_a_train_of_their_own_are_exact() -> None:
    model = FreezesNorms(nn.BatchNorm1d(3), nn.Sequential(MergedLora(), nn.Dropout()), MergedLora())
    model[0].train()  # against what the class does
    model[1].eval()
    model[1][1].train()
    before = _modes(model)
    for _ in range(2):
        with in_eval_mode(model):
            assert not any(_modes(model).values())
            assert model[1][0].merged
            assert model[2].merged
        assert _modes(model) == before
        assert (model[1][0].merged, model[2].merged) == (True, False)


def test_a_disabled_train_is_respected(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(3), nn.Dropout()).eval(), nn.Linear(3, 1))
    model[0].train = lambda mode=True: model[0]  # type: ignore[method-assign]  # as LAVIS does it
    _train(tmp_path, model)
    assert _modes(model) == {"": True, "0": False, "0.0": False, "0.1": False, "1": True}


def test_a_model_wholly_in_eval_mode_is_trained_so_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
    _train(tmp_path, model)
    assert not any(_modes(model).values())
    assert [record.getMessage()[:33] for record in caplog.records] == ["the whole model is in eval mode, "]
    caplog.clear()
    _train(tmp_path, nn.Sequential(nn.BatchNorm1d(3).eval(), nn.Linear(3, 1)))
    assert not caplog.records

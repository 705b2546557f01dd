"""AnomalyDetectionHook: it names the operation, and always restores the process's mode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.hooks.check_invalid_loss import AnomalyDetectionHook
from tests.helpers import at
from tests.hooks.tiny_runs import engine_of

Mode = tuple[bool, bool]


def _mode() -> Mode:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = _mode()
    yield
    torch.autograd.set_detect_anomaly(*before)


class Bad(nn.Module):
    """Its output is finite, its gradient is not: that of the square root at 0 is infinite, and then multiplied by 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.linear(batch)
        return (out * 0).sqrt()


@pytest.mark.filterwarnings("ignore:Error detected in MulBackward0")
def test_a_nan_in_the_backward_pass_is_named(tmp_path: Path) -> None:
    hook = AnomalyDetectionHook()
    with pytest.raises(RuntimeError, match="Function 'MulBackward0' returned nan values"):
        engine_of(tmp_path, {"anomaly_detection": hook}, net=Bad(), val=False).train()
    assert not torch.is_anomaly_enabled(), "after an error, too"


class Broken(torch.autograd.Function):
    """A forward pass only."""

    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:  # type: ignore[override]
        return value.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ValueError("on purpose")


class OneWay(Bad):
    """Its backward pass fails."""

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = Broken.apply(self.linear(batch))
        return out


def test_without_check_nan_only_the_traceback_is_added(tmp_path: Path) -> None:
    hook = AnomalyDetectionHook(check_nan=False)
    engine_of(tmp_path, {"anomaly_detection": hook}, net=Bad(), val=False, allow_nan=True).train()
    with (
        pytest.warns(UserWarning, match=r"Traceback of forward call that caused the error(.|\n)*Broken\.apply"),
        pytest.raises(ValueError, match="on purpose"),
    ):
        engine_of(tmp_path, {"anomaly_detection": hook}, net=OneWay(), val=False).train()


@pytest.mark.parametrize("before", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("check_nan", [True, False])
@pytest.mark.parametrize("fails", [None, "before_run", "before_train_iter", "before_val", "after_train"])
def test_the_mode_is_what_it_was(before: Mode, check_nan: bool, fails: str | None, tmp_path: Path) -> None:
    seen: list[Mode] = []

    def look(engine: Engine) -> None:
        seen.append(_mode())

    def fail(engine: Engine) -> None:
        raise RuntimeError("on purpose")

    hooks: dict[str, Hook] = {"look": at("before_train_iter", look, nth=0), "too": at("before_val_iter", look, nth=0)}
    if fails is not None:
        hooks["fail"] = at(fails, fail)
    torch.autograd.set_detect_anomaly(*before)
    engine = engine_of(tmp_path, {"anomaly_detection": AnomalyDetectionHook(check_nan=check_nan), **hooks})
    if fails is None:
        engine.train()
    else:
        with pytest.raises(RuntimeError, match="on purpose"):
            engine.train()
    assert _mode() == before
    assert set(seen) == (set() if fails == "before_run" else {(True, check_nan)})


def test_a_warning_names_the_mode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine_of(tmp_path, {"anomaly_detection": AnomalyDetectionHook()}).train()
    assert "hooks.anomaly_detection: autograd's anomaly mode is on, which makes training slow" in caplog.text

"""`fused`: one kernel for all parameters, if it works in every run; and optimizers of a project."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn, optim

import hydraloop
from hydraloop import build
from hydraloop.engine.checkpoint.optimizer_state import load_state
from hydraloop.errors import UserError
from hydraloop.optim import resolve_fused
from hydraloop.optim.optimizers import build_optimizer
from hydraloop.safety.allowlist import ALLOWLIST, from_python
from hydraloop.schemas.optimizer import OPTIONS
from tests.config.composed import REPOSITORY
from tests.helpers import differences, logged

FLOATS = [torch.zeros(2), torch.zeros(3)]


@pytest.mark.parametrize("given", [True, False, None])
def test_an_explicit_fused_is_kept(given: bool | None) -> None:
    assert resolve_fused(given, FLOATS, optimizer="SGD") is given


def test_auto_is_fused_if_the_kernel_works() -> None:
    assert resolve_fused("auto", FLOATS, optimizer="AdamW") is True
    assert resolve_fused("auto", [*FLOATS, torch.zeros(2, dtype=torch.complex64)], optimizer="AdamW") is None
    assert resolve_fused("auto", [torch.zeros(2, device="meta")], optimizer="AdamW") is None


def test_another_value_names_the_key() -> None:
    with pytest.raises(UserError) as caught:
        resolve_fused("yes", FLOATS, optimizer="AdamW")
    assert caught.value.key == "optimizer.fused"


OFFERED = (*OPTIONS, "adadelta", "adamax", "asgd", "nadam", "radam", "rprop")
"""The options of the group, and torch's other optimizers for dense gradients, by `_target_`."""
OF_TORCH = {name.lower(): name for name in vars(optim) if name[0].isupper()}


def as_built(name: str, model: nn.Module) -> Any:
    """Return the optimizer that the config `optimizer=<name>` describes."""
    options: Any = {"_target_": f"torch.optim.{OF_TORCH[name]}", "lr": 0.1}
    cfg = OmegaConf.create({"optimizer": OmegaConf.structured(OPTIONS[name]) if name in OPTIONS else options})
    with ALLOWLIST.trusting(Path(__file__).parents[2], [], from_python("build")):
        return build_optimizer(cfg, model, model)


def loss_of(optimizer: optim.Optimizer, layers: Sequence[nn.Module], value: float) -> torch.Tensor:
    """Compute a loss that depends on these layers, and their gradients. The others have none."""
    optimizer.zero_grad()
    x = torch.full((1, 3), value)
    loss = sum((layer(x).square().sum() for layer in layers), torch.zeros((), requires_grad=True))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def stepped(name: str, *, resumed: bool) -> list[torch.Tensor]:
    """Return the weights after ten steps, in which three layers get their first gradients at different times.

    In steps 0, 5 and 6, no layer has a gradient.
    """
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(3, 2, bias=False) for _ in range(3))
    optimizer = as_built(name, layers)
    for step, count in enumerate([0, 1, 1, 2, 3, 0, 0, 3, 2, 3]):
        if resumed and step in (3, 5):
            layers, earlier = copy.deepcopy(layers), torch.load(saved(optimizer), weights_only=True)
            load_state(optimizer := as_built(name, layers), earlier)
        closure = functools.partial(loss_of, optimizer, layers[:count], 1.0 + step)
        closure()
        optimizer.step(closure if name == "lbfgs" else None)
    return [parameter.detach() for parameter in layers.parameters()]


def saved(optimizer: optim.Optimizer) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return file


@pytest.mark.parametrize("name", OFFERED)
def test_parameters_may_get_their_first_gradient_late_also_after_a_resume(name: str) -> None:
    weights = stepped(name, resumed=False)
    assert all(map(torch.equal, weights, stepped(name, resumed=True)))
    assert all(weight.isfinite().all() for weight in weights)


class Own(torch.optim.Optimizer):
    """An optimizer that checks nothing but its decay."""

    def __init__(self, params, lr=0.1, decay=0.0) -> None:  # type: ignore[no-untyped-def]  # as many write it
        if decay < 0:
            raise ValueError(f"decay is {decay}")
        super().__init__(params, {"lr": lr})


def own(**options: Any) -> torch.optim.Optimizer:
    model = nn.Linear(1, 1)
    cfg = OmegaConf.create({"optimizer": {"_target_": f"{__name__}.Own", **options}})
    with ALLOWLIST.trusting(Path(__file__).parents[2], [], from_python("build")):
        return build_optimizer(cfg, model, model)


def test_an_optimizer_needs_no_partial() -> None:
    assert own(lr=0.5).param_groups[0]["lr"] == 0.5
    assert own(_partial_=False).param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            {"decay": -1},
            r"^optimizer: Own refuses .*: decay is -1 \(test_optimizers.py, .*\n  Change optimizer.decay.$",
        ),
    ],
)
def test_a_wrong_option_of_an_own_optimizer_is_named(option: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        own(**option)


SEVERAL = ("~optimizer", "+optimizer@optimizer.hidden=muon", "+optimizer@optimizer.rest=adamw")
SHORT = ("engine.device=cpu", "engine.max_epochs=2", "engine.limit_train_batches=5", "engine.val_interval=null")
SHORT += ("engine.limit_test_batches=1", "hooks=[ema]", "default_hooks.logger.interval=1")


def trained(run_dir: Path, *lines: str) -> dict[str, Any]:
    """Return the last checkpoint of a run of two epochs."""
    build(hydraloop.compose([*SHORT, *lines], folder=REPOSITORY), run_dir=run_dir).train()
    found: dict[str, Any] = torch.load(run_dir / "checkpoints" / "epoch_2.pth", weights_only=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_trains_and_resumes(option: str, tmp_path: Path) -> None:
    lines = [*SEVERAL, "optimizer.hidden.match=@matrix"] if option == "muon" else [f"optimizer={option}"]
    key = "optimizer.rest" if option == "muon" else "optimizer"
    if option == "lbfgs":  # takes no groups
        lines += ["optimizer.max_iter=4"]
    else:
        lines += [f'{key}.groups=[{{match: "@bias", lr_scale: 2}}]']
    uninterrupted = trained(tmp_path, *lines)
    losses = [record["loss"] for record in logged(tmp_path / "metrics.jsonl") if record["mode"] == "train"]
    assert sum(losses[-3:]) < sum(losses[:3])
    (tmp_path / "checkpoints" / "epoch_2.pth").unlink()
    resumed = trained(tmp_path, *lines, f"resume={tmp_path / 'checkpoints' / 'epoch_1.pth'}")
    for part in ("state_dict", "optimizer", "schedulers"):
        assert not list(differences(resumed[part], uninterrupted[part])), part

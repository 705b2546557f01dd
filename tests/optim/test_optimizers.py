"""`fused`: one kernel for all parameters, if it works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.errors import UserError
from hydraloop.optim import resolve_fused
from hydraloop.optim.optimizers import build_optimizer
from hydraloop.safety.allowlist import ALLOWLIST, from_python
from tests.ranks import on_ranks

FLOATS = [torch.zeros(2), torch.zeros(3)]


@pytest.mark.parametrize("given", [True, False, None])
def test_an_explicit_fused_is_kept(given: bool | None) -> None:
    assert resolve_fused(given, FLOATS) is given


def test_auto_is_fused_if_the_kernel_works() -> None:
    assert resolve_fused("auto", FLOATS) is True
    assert resolve_fused("auto", [*FLOATS, torch.zeros(2, dtype=torch.complex64)]) is None
    assert resolve_fused("auto", [torch.zeros(2, device="meta")]) is None


def test_another_value_names_the_key() -> None:
    with pytest.raises(UserError) as caught:
        resolve_fused("yes", FLOATS)
    assert caught.value.key == "optimizer.fused"


def resolve_on_shards(distributed: Distributed) -> list[bool | None]:
    """Return the result of `auto` for two optimizers of a sharded model."""
    distributed.prepare(model := torch.nn.Linear(3, 1))
    return [resolve_fused("auto", model.parameters(), optimizer=name) for name in ("AdamW", "SGD")]


def test_sharded_parameters_are_fused_only_in_some_optimizers() -> None:
    # torch's fused SGD does not support sharded parameters. If this fails, remove _FUSED_ON_SHARDS.
    assert on_ranks(2, resolve_on_shards, strategy="fsdp2") == [[True, None]] * 2


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
        ({"lr": "abc"}, r"^optimizer.lr: 'abc' is not a number\n  Write one: \+\+optimizer.lr=0.001$"),
        (
            {"decay": -1},
            r"^optimizer: Own refuses .*: decay is -1 \(test_optimizers.py, .*\n  Change optimizer.decay.$",
        ),
    ],
)
def test_a_wrong_option_of_an_own_optimizer_is_named(option: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        own(**option)

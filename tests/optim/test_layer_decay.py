"""`optimizer.layer_decay`."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from hydraloop.errors import UserError
from tests.optim.test_groups import ADAMW, NO_DECAY, built, settings


class Bert(nn.Module):
    """Named as the models of transformers: an embedding, layers, a pooler, and a head that may be tied."""

    def __init__(self, layers: int = 3, *, tied: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=layers)
        self.embeddings = nn.Embedding(4, 4)
        self.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.pooler = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        if tied:
            self.head.weight = self.embeddings.weight


def layers_of(model: Any) -> list[nn.Module]:
    return [*model.encoder]


def lrs(net: nn.Module, **options: Any) -> dict[str, float]:
    optimizer = built(net, {**ADAMW, "lr": 1.0, "layer_decay": 0.5, **options})
    return {name: lr for name, (lr,) in settings(net, optimizer, "lr").items()}


def test_the_lr_of_a_layer_is_that_of_the_next_times_the_decay() -> None:
    expected = {
        "embeddings": 0.5**4,
        "encoder.0": 0.5**3,
        "encoder.1": 0.5**2,
        "encoder.2": 0.5,
        "pooler": 1,
        "head": 1,
    }
    for options in ({}, {"layers_of": {"_target_": f"{__name__}.layers_of"}}):
        found = lrs(Bert(), **options)
        assert {name.rpartition(".")[0]: lr for name, lr in found.items()} == expected
    tied = lrs(Bert(tied=True))
    assert (tied["embeddings.weight"], tied["head.bias"]) == (0.5**4, 1)


def test_rules_apply_to_layers_too_and_the_first_group_has_the_lr_of_the_config() -> None:
    net = Bert(1)
    rules = [NO_DECAY, {"match": "head", "lr_scale": 10}]
    optimizer = built(net, {**ADAMW, "layer_decay": 0.5, "groups": rules})
    found = settings(net, optimizer, "lr", "weight_decay")
    assert found["encoder.0.weight"] == (5e-4, 0.1)
    assert found["encoder.0.bias"] == (5e-4, 0)
    assert found["head.weight"] == (1e-2, 0.1)
    assert found["head.bias"] == (1e-2, 0)
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_the_depths_of_timms_models_are_timms(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timm(Bert):
        def group_matcher(self, coarse: bool) -> dict[str, str]:
            assert not coarse
            return {"stem": "^embeddings"}

    def group_parameters(model: nn.Module, matcher: dict[str, str], *, reverse: bool) -> dict[str, int]:
        assert reverse
        assert matcher == {"stem": "^embeddings"}
        return {name: 0 if name.startswith("embeddings") else 7 for name, _ in model.named_parameters()}

    package: Any = ModuleType("timm.models")
    package.group_parameters = group_parameters
    monkeypatch.setitem(sys.modules, "timm.models", package)
    assert set(lrs(Timm()).values()) == {0.5**7, 1}


@pytest.mark.parametrize(
    ("net", "options", "message"),
    [
        (
            nn.Linear(2, 1),
            {},
            r"^optimizer.layer_decay: Linear does not list its layers\n.*optimizer.layers_of._target_",
        ),
        (
            nn.ModuleList([Bert(2), nn.ModuleList([Bert(2), Bert(2)])]),
            {},
            r"^optimizer.layer_decay: ModuleList does not",
        ),
        (Bert(), {"layer_decay": 1.5}, r"^optimizer.layer_decay: 1.5 is out of range"),
    ],
)
def test_what_cannot_decay_is_refused(net: nn.Module, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"(?s){message}"):
        lrs(net, **options)

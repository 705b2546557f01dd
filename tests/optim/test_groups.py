"""Parameter groups from rules."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn, optim

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.named_optimizers import OptimizerSet, describe, parts
from hydraloop.engine.parameter_patterns import matched, places_of
from hydraloop.errors import UserError
from hydraloop.optim.optimizers import build_optimizer
from hydraloop.safety.allowlist import ALLOWLIST
from tests.ranks import on_ranks

ADAMW = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 1e-3, "weight_decay": 0.1}
NO_DECAY = {"match": "@norm|@bias|@embedding", "weight_decay": 0}


class LlamaRMSNorm(nn.Module):
    """A norm that is no class of torch, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.ones_(nn.Parameter(nn.Linear(4, 1).weight[0].detach())))


class NormalizedLinear(nn.Linear):
    """Not a norm: it has a matrix."""


class Net(nn.Module):
    """Every kind of parameter, with two tied matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.pos_embed = nn.Parameter(nn.Linear(4, 3).weight.detach())
        self.cls_token = nn.Parameter(nn.Linear(4, 1).weight.detach())
        self.conv1 = nn.Conv1d(4, 4, 3)
        self.bn1 = nn.BatchNorm1d(4)
        self.attention = nn.MultiheadAttention(4, 1)
        self.ln = LlamaRMSNorm()
        self.norm_head = NormalizedLinear(4, 4)
        self.lm_head = nn.Linear(4, 8, bias=False)
        self.lm_head.weight = self.embed.weight


def names(net: nn.Module, pattern: str) -> set[str]:
    places = places_of(net)
    return {places[parameter][0][0] for parameter in matched(pattern, places, "optimizer.groups[0].match")}


def test_kinds_and_names() -> None:
    net = Net()
    assert names(net, "@norm") == {"bn1.weight", "bn1.bias", "ln.weight"}
    biases = {"conv1.bias", "bn1.bias", "attention.in_proj_bias", "attention.out_proj.bias", "norm_head.bias"}
    assert names(net, "@bias") == biases
    assert names(net, "@embedding") == {"embed.weight", "pos_embed", "cls_token"}
    assert names(net, "@matrix") == {"attention.in_proj_weight", "attention.out_proj.weight", "norm_head.weight"}
    assert names(net, "lm_head") == {"embed.weight"}  # tied: it has both names
    assert names(net, "@matrix|!*head*") == names(net, "@matrix") - {"norm_head.weight"}
    assert names(net, "!re:.*(weight|bias)") == {"pos_embed", "cls_token"}
    assert names(net, r"bn1|re:conv\d\.(weight|bias)") == {"bn1.weight", "bn1.bias", "conv1.weight", "conv1.bias"}


def built(net: nn.Module, optimizer: Any) -> optim.Optimizer:
    ALLOWLIST.trust(["tests"])
    task = nn.Module()
    task.model = net
    cfg = OmegaConf.create({"optimizer": optimizer})
    assert isinstance(cfg, DictConfig)
    return build_optimizer(cfg, net, task)


def settings(net: nn.Module, optimizer: optim.Optimizer, *keys: str) -> dict[str, tuple[Any, ...]]:
    """{name of a parameter: the values of its group}."""
    groups = zip(describe(optimizer, net), optimizer.param_groups, strict=True)
    return {name: tuple(group[key] for key in keys) for described, group in groups for name in described.names}


def test_every_matching_rule_applies_and_a_later_one_wins_for_each_key() -> None:
    net = Net()
    head = {"match": "norm_head", "lr_scale": 10, "weight_decay": 0.5, "name": "head"}
    last = {"match": "norm_head.bias", "betas": [0.5, 0.9], "lr_scale": 2}
    optimizer = built(net, {**ADAMW, "groups": [NO_DECAY, head, last]})
    found = settings(net, optimizer, "lr", "weight_decay", "betas")
    assert found.pop("norm_head.weight") == (0.01, 0.5, (0.9, 0.999))
    assert found.pop("norm_head.bias") == (0.002, 0.5, (0.5, 0.9))
    decayed = {name for name, values in found.items() if values == (1e-3, 0.1, (0.9, 0.999))}
    assert decayed == {"conv1.weight", "attention.in_proj_weight", "attention.out_proj.weight"}
    assert {found[name] for name in found.keys() - decayed} == {(1e-3, 0, (0.9, 0.999))}
    assert [group.label for group in describe(optimizer, net)] == ["0", "1", "head", "head.3"]
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 9, 1, 1]  # equal settings: one group
    assert all("lr_scale" not in group for group in optimizer.param_groups)


def test_frozen_parameters_are_in_no_group() -> None:
    net = Net()
    net.embed.requires_grad_(False)
    assert "embed.weight" not in settings(net, built(net, {**ADAMW, "groups": [NO_DECAY]}))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([NO_DECAY, {"match": "lmhead.*", "lr": 1}], r"groups\[1\].match: 'lmhead.\*' matches no name\n.*lm_head"),
        ([{"match": "@norms", "lr": 1}], r"groups\[0\].match: '@norms' is not a kind.*\n  Did you mean @norm, "),
        ([{"match": "conv1", "lr": 1}], r"groups\[0\].match: 'conv1' matches only frozen parameters"),
        ([{"match": "bn1", "weight_decai": 0}], r"groups\[0\].weight_decai: .*AdamW.*\n  Did you mean weight_decay"),
        (
            [{"match": r"re:bn\.[0-", "lr": 1}],
            r"groups\[0\].match: 're:bn\\.\[0-' is not a regular expression: .*\n  A",
        ),
        ([{"match": "bn1"}], r"groups\[0\]: needs a pattern, match, and a value"),
        (["bn1"], r"groups\[0\]: needs a pattern"),
    ],
)
def test_a_wrong_rule_is_refused(rules: list[Any], message: str) -> None:
    net = Net()
    net.conv1.requires_grad_(False)
    with pytest.raises(UserError, match=rf"(?s)^optimizer\.{message}"):
        built(net, {**ADAMW, "groups": rules})


def groups_of_shards(distributed: Distributed) -> list[tuple[str, ...]]:
    """Step optimizers of a sharded model, and return the names in the groups."""
    net = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    distributed.prepare(net)
    optimizer = built(net, {"a": {**MUON, "match": "@matrix"}, "b": {**ADAMW, "groups": [NO_DECAY]}})
    net(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    return [group.names for group in describe(optimizer, net)]


@pytest.mark.slow
def test_sharded_parameters_have_the_same_groups() -> None:
    names = [("1.weight",), ("0.weight", "1.bias", "2.weight", "2.bias")]
    assert on_ranks(2, groups_of_shards, strategy="fsdp2") == [names] * 2


MUON = {"_target_": "torch.optim.Muon", "_partial_": True}


def test_several_optimizers_share_the_parameters_out() -> None:
    net = Net()
    optimizer = built(net, {"hidden": {**MUON, "match": "@matrix|!norm_head"}, "rest": {**ADAMW, "groups": [NO_DECAY]}})
    assert isinstance(optimizer, OptimizerSet)
    described = describe(optimizer, net)
    assert [(group.optimizer, group.label) for group in described] == [("hidden", "0"), ("rest", "0"), ("rest", "1")]
    assert set(described[0].names) == {"attention.in_proj_weight", "attention.out_proj.weight"}
    assert {type(one).__name__ for one in parts(optimizer).values()} == {"Muon", "AdamW"}
    assert {name for group in described for name in group.names} == {name for name, _ in net.named_parameters()}


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"lr": -1.0}, r"Invalid learning rate: -1.0\n  Change optimizer.lr.$"),
        ({"betas": [1.5, 0.9]}, r"1.5\n  Change optimizer.lr, optimizer.weight_decay, optimizer.betas.$"),
        (
            {"fused": True, "differentiable": True},
            r"`differentiable`\n  Change optimizer.fused, optimizer.differentiable.$",
        ),
    ],
)
def test_what_torch_refuses_comes_with_a_remedy(options: Any, remedy: str) -> None:
    with pytest.raises(UserError, match=rf"^optimizer: AdamW refuses its options: .*{remedy}"):
        built(Net(), {**ADAMW, **options})


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        (
            {"a": {**ADAMW, "match": "@norm"}, "b": {**ADAMW, "match": "*"}},
            r'^optimizer: bn1.weight is in two optimizers, a and b\n.*optimizer.a.match="…\|!bn1.weight"',
        ),
        ({"a": {**ADAMW, "match": "@norm"}}, r"^optimizer: pos_embed is in no optimizer"),
        ({"a": ADAMW, "b": ADAMW}, r"^optimizer.b.match: a takes the rest"),
        ({**ADAMW, "match": "bn1"}, r"^optimizer.match: one optimizer takes all"),
        ({"a": {**ADAMW, "match": "bn2"}}, r"^optimizer.a.match: 'bn2' matches no name\n.*bn1"),
        ({"a": None}, r"^optimizer: there is nothing to build"),
    ],
)
def test_each_parameter_is_in_exactly_one_optimizer(optimizers: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        built(Net(), optimizers)


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
    for_all = [*rules, {"match": "!head", "betas": [0.8, 0.9]}]
    optimizer = built(net, {**ADAMW, "layer_decay": 0.5, "groups": for_all})
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

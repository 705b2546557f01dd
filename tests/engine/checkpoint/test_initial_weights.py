"""Initial weights: which entries of a file go to which entries of the model, files of other tools, and what is said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hydraloop.engine.checkpoint import initial_weights
from hydraloop.engine.checkpoint.initial_weights import Rules
from hydraloop.errors import UserError
from tests.helpers import converted, make_engine, tiny_task


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(2, 2)
        self.head = nn.Linear(2, 1)


def initialise(model: nn.Module, path: str | Path, prefix: str | None = None, **rules: Any) -> None:
    initial_weights.initialise(model, Path(path), Rules(prefix=prefix, **rules))


def _saved(path: Path, entries: Any) -> Path:
    torch.save(entries, path)
    return path


def _filled(value: float) -> dict[str, Tensor]:
    """The entries of a `_Net`, all with one value."""
    return {name: torch.full_like(tensor, value) for name, tensor in _Net().state_dict().items()}


def test_init_takes_what_fits_by_name(tmp_path: Path) -> None:
    model = _Net()
    head = model.head.weight.clone()
    initialise(model, _saved(tmp_path / "a.pth", {"backbone.weight": torch.ones(2, 2), "other": torch.ones(1)}))
    assert torch.equal(model.backbone.weight, torch.ones(2, 2))
    assert torch.equal(model.head.weight, head)


@pytest.mark.parametrize("prefix", ["backbone.", "backbone"])
@pytest.mark.parametrize(
    ("model", "entries"),
    [
        (_Net, {"backbone.weight": (2, 2), "head.weight": (1, 2)}),
        (lambda: nn.Linear(2, 2), {"backbone.weight": (2, 2), "backbone2.weight": (2, 2), "head.weight": (1, 2)}),
        (_Net, {"weight": (2, 2), "bias": (2,), "fc.weight": (1, 2)}),
    ],
    ids=["both have the prefix", "the file has it", "the model has it"],
)
def test_init_with_a_prefix_takes_only_those(
    tmp_path: Path, prefix: str, model: Callable[[], nn.Module], entries: dict[str, tuple[int, ...]]
) -> None:
    made = model()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    theirs = {name: torch.full(shape, 0.0 if name.startswith("backbone2") else 1.0) for name, shape in entries.items()}
    initialise(made, _saved(tmp_path / "a.pth", theirs), prefix)
    for name, value in made.state_dict().items():
        taken = {name, f"backbone.{name}", name.removeprefix("backbone.")} & entries.keys() and "head" not in name
        assert torch.equal(value, torch.ones_like(value) if taken else before[name]), name


@pytest.mark.parametrize(
    ("entries", "prefix", "key", "words"),
    [
        ({"x.weight": torch.ones(2, 2)}, "backbone.", "init.prefix", "begins with 'backbone.'"),
        ({"x.weight": torch.ones(2, 2)}, None, "init.checkpoint", "x.weight"),
        ({"backbone.weight": torch.ones(3, 2)}, None, "init.checkpoint", r"\(3, 2\)"),
    ],
)
def test_init_that_does_not_fit_names_what_and_where(
    tmp_path: Path, entries: dict[str, Tensor], prefix: str | None, key: str, words: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        initialise(_Net(), _saved(tmp_path / "a.pth", entries), prefix)
    assert caught.value.key == key


# The rules. ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["head.*", "head", "h*d", "re:head"])
def test_excluded_entries_keep_the_models_own_values(tmp_path: Path, pattern: str) -> None:
    model = _Net()
    head = model.head.weight.clone()
    initialise(model, _saved(tmp_path / "a.pth", _filled(1.0)), exclude=[pattern])
    assert torch.equal(model.head.weight, head)
    assert torch.equal(model.backbone.weight, torch.ones(2, 2))


@pytest.mark.parametrize(
    ("rules", "key", "words"),
    [
        ({"exclude": ["haed.*"]}, "init.exclude", "'haed.\\*' matches no name\n  Did you mean head"),
        ({"exclude": ["re:("]}, "init.exclude", "not a regular expression"),
    ],
)
def test_a_rule_that_concerns_nothing_is_an_error(tmp_path: Path, rules: Any, key: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        initialise(_Net(), _saved(tmp_path / "a.pth", _filled(1.0)), **rules)
    assert caught.value.key == key


# Another head, and the table. ----------------------------------------------------------------------------------------


def _other_head(path: Path) -> Path:
    entries = {
        **_filled(1.0),
        "head.weight": torch.ones(10, 2),
        "head.bias": torch.ones(10),
        "neck.scale": torch.ones(1),
    }
    del entries["backbone.bias"]
    return _saved(path, entries)


def test_another_head_is_an_error_and_both_remedies_work(tmp_path: Path) -> None:
    path, model = _other_head(tmp_path / "a.pth"), _Net()
    before = model.backbone.weight.clone()
    with pytest.raises(UserError, match=r"head.weight: \(10, 2\) in the file and \(1, 2\) in the model") as caught:
        initialise(model, path)
    assert torch.equal(model.backbone.weight, before), "nothing is loaded"
    assert caught.value.key == "init.checkpoint"
    assert "init.mismatched=skip" in str(caught.value.remedy)
    assert "'init.exclude=[head.*]'" in str(caught.value.remedy)
    for rules in ({"mismatched": "skip"}, {"exclude": ["head.*"]}):
        model = _Net()
        head = model.head.weight.clone()
        initialise(model, path, **rules)
        assert torch.equal(model.backbone.weight, torch.ones(2, 2))
        assert torch.equal(model.head.weight, head)


def test_the_remedy_for_a_parameter_outside_modules_works(tmp_path: Path) -> None:
    path = _saved(tmp_path / "a.pth", {"pos_embed": torch.ones(3), "scale": torch.ones(1)})
    model = nn.ParameterDict({"pos_embed": nn.Parameter(torch.zeros(2)), "scale": nn.Parameter(torch.zeros(1))})
    with pytest.raises(UserError) as caught:
        initialise(model, path)
    assert str(caught.value.remedy).endswith("'init.exclude=[pos_embed]'.")
    initialise(model, path, exclude=["pos_embed"])
    assert (model.pos_embed.tolist(), model.scale.tolist()) == ([0, 0], [1])


def test_the_table_lists_every_entry_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    initialise(_Net(), _other_head(tmp_path / "a.pth"), mismatched="skip")
    assert caplog.messages == [
        f"1 of 4 entries of the model taken from {tmp_path}/a.pth\n"
        "  taken                     1  backbone.weight\n"
        "  other shape               2  head.bias: (10,) in the file and (1,) in the model, "
        "head.weight: (10, 2) in the file and (1, 2) in the model\n"
        "  missing in the file       1  backbone.bias\n"
        "  not in the model          1  neck.scale"
    ]


def test_the_first_of_many_names_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = nn.ParameterDict({f"p{number}": nn.Parameter(torch.zeros(1)) for number in range(8)})
    initialise(model, _saved(tmp_path / "a.pth", model.state_dict()))
    assert caplog.messages[0].splitlines()[1:] == ["  taken                     8  p0, p1, p2, p3, p4, p5 and 2 more"]


# Tied weights. -------------------------------------------------------------------------------------------------------


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out, self.head = nn.Embedding(3, 2), nn.Linear(2, 2), nn.Linear(2, 3)
        self.head.weight = self.embed.weight


def _tied_file(path: Path, absent: str) -> Path:
    """All entries but one of two tied ones, as safetensors writes them."""
    entries = {name: torch.ones_like(value) for name, value in _Tied().state_dict().items() if name != absent}
    save_file(entries, path)
    return path


@pytest.mark.parametrize("absent", ["embed.weight", "head.weight"])
def test_a_tied_entry_that_the_file_has_under_another_name_is_not_missing(
    absent: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path, model = _tied_file(tmp_path / "a.safetensors", absent), _Tied()
    initialise(model, path)
    assert all((value == 1).all() for value in model.state_dict().values())
    assert "5 of 5 entries of the model taken" in caplog.messages[0]
    assert len(caplog.messages[0].splitlines()) == 2, "all are taken"
    task = tiny_task()
    task.model = _Tied()
    make_engine(tmp_path, task=task, load_from=path)
    assert all((value == 1).all() for value in task.model.state_dict().values())


@pytest.mark.parametrize("absent", ["embed.weight", "head.weight", ""])
@pytest.mark.parametrize("pattern", ["head", "embed.*", "head.weight"])
def test_a_tied_entry_is_excluded_by_each_of_its_names(
    pattern: str, absent: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = _Tied()
    weight = model.embed.weight.detach().clone()
    initialise(model, _tied_file(tmp_path / "a.safetensors", absent), exclude=[pattern])
    assert torch.equal(model.head.weight, weight)
    assert (model.out.weight == 1).all()
    excluded = caplog.messages[0].split("excluded", 1)[1]
    assert "embed.weight" in excluded
    assert "head.weight" in excluded
    assert "missing" not in excluded


# Files of other tools. -----------------------------------------------------------------------------------------------


class _History:
    """As mmengine's HistoryBuffer: an object with arrays."""

    def __init__(self) -> None:
        self.history, self.statistic = np.arange(3.0), {"min": min}


def _lightning() -> dict[str, Any]:
    return {
        "epoch": 2,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {f"model.{name}": value for name, value in _filled(2.0).items()},
        "callbacks": {"ModelCheckpoint{}": {"best_model_path": PurePosixPath("x"), "best": torch.ones(1)}},
    }


FOREIGN: dict[str, Callable[[], Any]] = {
    "plain": lambda: _filled(2.0),
    "ddp": lambda: {f"module.{name}": value for name, value in _filled(2.0).items()},
    "blocks": lambda: {name.replace(".", "._orig_mod.", 1): value for name, value in _filled(2.0).items()},
    "checkpointed blocks in ddp": lambda: {
        f"module.{name.replace('.', '._checkpoint_wrapped_module._orig_mod.', 1)}": value
        for name, value in _filled(2.0).items()
    },
    "a list as meta": lambda: {"state_dict": _filled(2.0), "meta": ["x"]},
    "ddp and compile": lambda: {"model": {f"module._orig_mod.{name}": value for name, value in _filled(2.0).items()}},
    "with the epoch": lambda: {"epoch": 3, "model_state_dict": _filled(2.0)},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_files_of_other_tools_are_loaded(tmp_path: Path, kind: str) -> None:
    model, path = _Net(), _saved(tmp_path / "a.pth", FOREIGN[kind]())
    initialise(model, path)
    assert all(torch.equal(value, torch.full_like(value, 2.0)) for value in model.state_dict().values())


@pytest.mark.parametrize(
    ("content", "prefix"),
    [
        (_lightning, "model."),
        (lambda: {"epoch": 3, "model_state_dict": _filled(2.0), "args": _History()}, None),
        (_Net, None),
    ],
)
def test_a_file_with_other_objects_is_converted_by_the_command_in_the_message(
    tmp_path: Path, content: Callable[[], Any], prefix: str | None
) -> None:
    path, model = _saved(tmp_path / "a b.pth", content()), _Net()
    initialise(model, converted(path), prefix)
    if content is not _Net:
        assert all(torch.equal(value, torch.full_like(value, 2.0)) for value in model.state_dict().values())


def test_wrappers_that_the_model_has_itself_stay(tmp_path: Path) -> None:
    model = nn.ModuleDict({"module": nn.Linear(1, 1)})
    task = tiny_task()
    task.model = model
    path = _saved(tmp_path / "a.pth", {name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()})
    make_engine(tmp_path, task=task, load_from=path)
    assert model["module"].weight.item() == 3.0


@pytest.mark.parametrize(
    "content", [{"epoch": 3, "net": {"a": torch.ones(1)}}, {"state_dict": {}}, {0: torch.ones(1), "a": torch.ones(1)}]
)
@pytest.mark.parametrize("load_from", [False, True])
def test_a_file_without_weights_names_its_entries(tmp_path: Path, content: Any, load_from: bool) -> None:
    path = _saved(tmp_path / "a.pth", content)
    with pytest.raises(UserError, match=f"contains no state dict; its entries are {next(iter(content))}") as caught:
        make_engine(tmp_path, load_from=path) if load_from else initialise(_Net(), path)
    assert caught.value.key == ("load_from" if load_from else "init.checkpoint")
    assert "torch.save(" in str(caught.value.remedy)


# When. ---------------------------------------------------------------------------------------------------------------


def test_load_from_has_taken_effect_when_the_engine_is_there(tmp_path: Path) -> None:
    theirs = tiny_task(seed=7)
    path = _saved(tmp_path / "a.pth", {"model": theirs.model.state_dict()})
    engine = make_engine(tmp_path, load_from=path)
    assert torch.equal(engine.model.weight, theirs.model.weight)

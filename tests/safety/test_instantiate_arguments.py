"""Arguments of third-party classes: those that a constructor takes are passed, those that it refuses are named."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from torch import nn

import hydraloop
from hydraloop.errors import UserError
from hydraloop.optim.optimizers import build_optimizer
from hydraloop.safety.allowlist import ALLOWLIST, from_python
from hydraloop.safety.instantiate import instantiate
from tests.config.composed import REPOSITORY

HERE = __name__


def strict(cls: type) -> type:
    """Wrap a constructor as `huggingface_hub.dataclasses.strict` does: it declares fewer arguments than it takes."""
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def wider(self: Any, *args: Any, **kwargs: Any) -> None:
        self.others = {name: kwargs.pop(name) for name in list(kwargs) if name not in init.__annotations__}
        init(self, *args, **kwargs)

    cls.__init__ = wider  # type: ignore[misc]
    return cls


@strict
class Bert:
    def __init__(self, hidden_size: int = 768, num_layers: int = 12) -> None:
        self.hidden_size, self.num_layers = hidden_size, num_layers


class TinyBert(Bert):
    """Its constructor is inherited."""


class Open:
    def __init__(self, size: int, **kwargs: Any) -> None:
        self.size, self.others = size, kwargs


class Plain:
    def __init__(self, hidden_size: int = 768) -> None:
        self.hidden_size = hidden_size


class Slots:
    """Python's own `object.__init__` shows `*args, **kwargs`, and takes none."""

    __slots__ = ()


def with_seed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wider(**kwargs: Any) -> Any:
        return function(seed=0, **{name: value for name, value in kwargs.items() if name != "verbose"})

    return wider


@with_seed
def make(seed: int, size: int) -> tuple[int, int]:
    return seed, size


@dataclass
class Box:
    path: str = "."
    sizes: Sequence[int] = ()
    inner: Box | None = None


@pytest.fixture(autouse=True)
def _trusted() -> None:
    ALLOWLIST.trust([HERE])


def in_a_project() -> AbstractContextManager[None]:
    return ALLOWLIST.trusting(Path(__file__).parents[2], [], from_python("build"))


def made(name: str, **arguments: Any) -> Any:
    return instantiate(OmegaConf.create({"_target_": f"{HERE}.{name}", **arguments}), "x")


def test_a_constructor_that_takes_more_than_it_declares_is_called() -> None:
    bert = made("Bert", hidden_size=32, num_labels=5)
    assert (bert.hidden_size, bert.num_layers, bert.others) == (32, 12, {"num_labels": 5})
    assert made("TinyBert", num_labels=5).others == {"num_labels": 5}


def test_what_a_decorator_gives_need_not_be_in_the_config() -> None:
    assert made("make", size=3, verbose=True) == (0, 3)


def test_a_missing_argument_is_named_although_others_are_accepted() -> None:
    assert made("Open", size=1, other=2).others == {"other": 2}
    with pytest.raises(UserError, match="missing a required argument: 'size'"):
        made("Open", other=2)


def test_an_argument_that_is_left_from_other_data_is_removed_by_the_experiment() -> None:
    node = OmegaConf.create({"_target_": f"{HERE}.Plain", "samples": 9})
    with pytest.raises(UserError, match="no_data"):
        instantiate(node, "data.train")


@pytest.mark.parametrize("name", ["Plain", "Slots"])
def test_any_other_constructor_is_not_called_with_an_unknown_name(name: str) -> None:
    with pytest.raises(UserError, match="takes no argument 'hidden_sise'"):
        made(name, hidden_sise=32)


@pytest.mark.parametrize(
    ("line", "key", "remedy"),
    [
        ("task.loss._target_=torch.nn.L1Loss", "task.loss", "~task.loss.label_smoothing"),
        (
            "task.model._target_=torch.nn.Flatten",
            "task.model",
            "task.model=null +task.model._target_=torch.nn.Flatten",
        ),
        (
            "optimizer._target_=torch.optim.Adagrad",
            "optimizer",
            "~optimizer +optimizer._target_=torch.optim.Adagrad +optimizer._partial_=True",
        ),
        (  # has all arguments but `fused`, which the dataclass inherits
            "optimizer._target_=torch.optim.NAdam",
            "optimizer",
            "~optimizer +optimizer._target_=torch.optim.NAdam +optimizer._partial_=True",
        ),
    ],
)
def test_a_value_that_is_left_from_another_class_is_named(line: str, key: str, remedy: str) -> None:
    with pytest.raises(UserError, match="takes no argument") as caught:
        built_at(key, line)
    assert str(caught.value.remedy).endswith(f": {remedy}")
    built_at(key, *([line] if remedy.startswith("~task") else []), *remedy.split())


def built_at(key: str, *lines: str) -> Any:
    cfg = hydraloop.compose(lines, folder=REPOSITORY)
    if key == "optimizer":
        model = nn.Linear(1, 1)
        return build_optimizer(cfg, model, model)
    return instantiate(OmegaConf.select(cfg, key), key)


class Mine:
    """Its constructor refuses an option."""

    def __init__(self, every: int = 1, mode: str = "a") -> None:
        if every < 0:
            raise ValueError(f"every cannot be {every}")


class Bare:
    """A class without arguments that cannot be built."""

    def __init__(self) -> None:
        raise ValueError("there is no variable ROOT")


class Buggy:
    def __init__(self, size: int) -> None:
        len(None)  # type: ignore[arg-type]  # raises the error


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "Mine",
            {"every": -1, "mode": "b"},
            r"Mine refuses its options: every cannot be -1 \(test_.*, line \d+\)\n  Change x\.every\.$",
        ),
        ("Bare", {}, r"Bare refuses .* ROOT \(.*\n  Change x\._target_, or add an option: \+x\.NAME"),
    ],
)
def test_options_that_a_constructor_refuses_are_one_message(name: str, arguments: dict[str, Any], message: str) -> None:
    with in_a_project(), pytest.raises(UserError, match=f"^x: {message}"):
        made(name, **arguments)


def test_a_type_error_of_a_projects_class_may_be_a_bug() -> None:
    with pytest.raises(Exception, match="NoneType") as caught:
        made("Buggy", size=5)
    assert not isinstance(caught.value, UserError)


def test_arguments_are_passed_as_they_are_and_a_dataclass_has_its_own_target() -> None:
    box = made("Box", path="a/b", sizes=[1, 2], inner={"_target_": f"{HERE}.Box"})
    assert box == Box("a/b", [1, 2], Box())


def reads(file: str) -> str:
    with open(file, encoding="utf-8") as opened:
        return opened.read()


def test_a_file_that_does_not_exist_is_named_with_the_key() -> None:
    ALLOWLIST.trust(["tests"])
    with pytest.raises(UserError, match=r"^task: there is no file gone.txt\n"):
        instantiate(OmegaConf.create({"_target_": f"{HERE}.reads", "file": "gone.txt"}), "task")

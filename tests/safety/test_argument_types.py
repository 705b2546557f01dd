"""Arguments of a project's own classes: converted to the annotated types, or refused with the key."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from omegaconf import OmegaConf
from torch import nn

from hydraloop.errors import UserError
from hydraloop.safety.allowlist import ALLOWLIST, from_python
from hydraloop.safety.instantiate import instantiate

if TYPE_CHECKING:
    from nowhere import Unknown  # type: ignore[import-not-found]  # only for type checkers


@dataclass
class Box:
    width: int = 3
    path: Path = Path()


@dataclass
class Boxes:
    first: Box
    others: list[Box] = field(default_factory=list)


class Mine:
    """Takes everything, and keeps what it got."""

    def __init__(
        self,
        every: int = 1,
        mode: Literal["a", "b"] = "a",
        folder: Path | None = None,
        box: Box | None = None,
        boxes: Boxes | None = None,
        size: int = None,  # type: ignore[assignment]  # noqa: RUF013  # as many write it
        unknown: Unknown = None,
        names: Iterable[str] = (),
        pair: tuple[int, float] = (0, 0.0),
        net: nn.Module | None = None,
        function: Callable[[int], int] | None = None,
        flag: bool = False,
        free=None,  # type: ignore[no-untyped-def]  # an argument without a type
    ) -> None:
        if every < 0:
            raise ValueError(f"every cannot be {every}")
        if free is not None:
            free + 1
        self.given = dict(locals())


class Bare:
    """A class without arguments that cannot be built."""

    def __init__(self) -> None:
        raise ValueError("there is no variable ROOT")


class Buggy:
    def __init__(self, size: int) -> None:
        len(None)  # type: ignore[arg-type]  # raises the error


def plus(x: int, a: int = 1) -> int:
    return x + a


@pytest.fixture(autouse=True)
def _in_a_project() -> Iterator[None]:
    with ALLOWLIST.trusting(Path(__file__).parents[2], [], from_python("build")):
        yield


def node(name: str = "Mine", **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"{__name__}.{name}", **arguments}


def made(name: str = "Mine", **arguments: Any) -> Any:
    return instantiate(OmegaConf.create(node(name, **arguments)), "hooks.mine")


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("every", 5, 5),
        ("every", "5", 5),
        ("every", 2.0, 2),
        ("mode", "b", "b"),
        ("folder", "x/y", Path("x/y")),
        ("folder", None, None),
        ("box", {"width": "4", "path": "p"}, Box(4, Path("p"))),
        ("boxes", {"first": {}, "others": [{"width": 1}]}, Boxes(Box(), [Box(1)])),
        ("size", None, None),
        ("unknown", 5, 5),
        ("names", ["a", "b"], ["a", "b"]),
        ("pair", [1, 2], (1, 2.0)),
        ("flag", True, True),
        ("free", 5, 5),
        ("box", node("Box", width="7"), Box(7)),
    ],
)
def test_a_value_is_passed_as_the_annotated_type(name: str, given: Any, expected: Any) -> None:
    found = made(**{name: given}).given[name]
    assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": "abc"}, "every: 'abc' does not fit: input should be a valid integer"),
        ({"every": True}, "every: True does not fit: input should be a valid integer\n  It takes int: ++"),
        ({"every": 2.5}, "every: 2.5 does not fit"),
        ({"every": None}, "every: None does not fit"),
        ({"mode": "c"}, "mode: 'c' does not fit: input should be 'a' or 'b'\n  It takes Literal['a', 'b']: ++"),
        ({"box": {"widht": 4}}, "box.widht: there is no such option\n  Did you mean width?"),
        ({"box": {"width": True}}, "box.width: True does not fit"),
        ({"boxes": {}}, "boxes.first: has no value\n  Give it one: ++hooks.mine.boxes.first=…"),
        ({"boxes": {"first": {}, "others": [{}, {"width": "x"}]}}, "boxes.others[1].width: 'x' does not fit"),
        ({"pair": [1, 2, 3]}, "pair: [1, 2, 3] does not fit"),
        ({"function": "plus"}, "function: 'plus' does not fit: input should be callable"),
        ({"function": node("plus", a="x", _partial_=True)}, "function.a: 'x' does not fit"),
        ({"every": -1}, ": Mine refuses its options: every cannot be -1 (test_argument_types.py, line "),
        ({"free": "abc"}, ": Mine refuses its options: can only concatenate str"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_key(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        made(**arguments)
    key = "hooks.mine" if message.startswith(":") else "hooks.mine."
    assert str(caught.value).startswith(f"{key}{message}")


def test_objects_are_passed_as_they_are_and_a_partial_keeps_its_function() -> None:
    given = made(
        net={"_target_": "torch.nn.Flatten"}, function={"_target_": f"{__name__}.plus", "_partial_": True, "a": "4"}
    ).given
    assert isinstance(given["net"], nn.Flatten)
    assert given["function"].func is plus
    assert given["function"](1) == 5


def test_what_to_change_is_named() -> None:
    with pytest.raises(UserError, match=r"\n  It takes int: \+\+hooks\.mine\.every=1$"):
        made(every="x")
    with pytest.raises(UserError, match=r"\n  Change hooks\.mine\.every\.$"):
        made(every=-1, mode="b")
    with pytest.raises(UserError, match=r"there is no variable ROOT \(.*\n  Change hooks.mine._target_, or add"):
        made("Bare")


def test_a_type_error_that_names_no_option_may_be_a_bug() -> None:
    with pytest.raises(Exception, match="NoneType") as caught:
        made("Buggy", size=5)
    assert not isinstance(caught.value, UserError)


def test_exact_types_are_passed_without_pydantic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic", None)
    assert made(every=3, flag=True, mode="a", unknown=1).given["every"] == 3

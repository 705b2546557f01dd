from __future__ import annotations

import random
from pathlib import Path

from omegaconf import OmegaConf

from hydraloop.files.config_yaml import dumped

STRINGS = """
    1e-3 1.e5 -1e5 1_0e2 .e5 .5 1. +1 1_000 1:30.5 190:20:30 0x1f 0b1 0o17 017 1e 1e+ 1.5.2 .inf -.Inf .nan nan inf
    yes on True null ~ ??? - . .. + = << 2020-01-01 ü ${x} 'q' * *** %a @a `a &a !x #x
"""


def test_strings_are_read_back_as_strings() -> None:
    letters = random.Random(0)
    made = ["".join(letters.choices("0123456789eE.+-_:xainfN ", k=letters.randint(1, 6))) for _ in range(2000)]
    plain = {
        f"{n}": value for n, value in enumerate([*STRINGS.split(), *made, "", " a ", "a\nb", "a: b", "- a", "a b #c"])
    }
    found = OmegaConf.to_container(OmegaConf.create(dumped(plain)))
    assert isinstance(found, dict)
    assert {key: (value, found[key]) for key, value in plain.items() if value != found[key]} == {}


def test_other_values_are_read_back_as_they_are() -> None:
    plain = {"a": [1e-5, 1e20, -0.0, 1, None, True], "b": {3: b"ab", 1e-3: Path("x")}, "inf": float("-inf"), "c": []}
    assert repr(OmegaConf.to_container(OmegaConf.create(dumped(plain)))) == repr(plain)
    assert dumped({"a": (1, 2)}) == dumped({"a": [1, 2]})

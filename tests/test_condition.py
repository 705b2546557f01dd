"""Conditions of `runs`."""

from __future__ import annotations

import pytest

from hydraloop.condition import Condition
from hydraloop.errors import UserError


def condition(text: str, *names: str) -> Condition:
    return Condition(text, names, key="x", example="a > 1")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("name == 'a'", 3),
        ("name in ['b', 'c']", 3),
        ("x == null", 2),
        ("x != null and x >= 2", 2),
        ("0 < (x == null) + 1 < 2", 4),
        ("x == null or x * 3 % 2 == 1 and 2 * (x + 1.5) % 2 == 1.0", 4),
        ("x in (1, 2) or name not in ('a',)", 5),
    ],
)
def test_conditions(text: str, count: int) -> None:
    found = condition(text, "name", "x")
    assert sum(found.holds({"name": name, "x": x}, []) for name in "ab" for x in (1, 2, None)) == count


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        ("b == 1", "b is unknown here", "x=\\\"'b' == 1\\\""),
        ("a <", "a < is not a condition", "Compare keys"),
        ("print(1)", "print(1) cannot be part of a condition", "Compare keys"),
        ("a ** 2 > 1", "a ** 2 cannot be part", "Compare keys"),
        ("a < 'x'", "a < 'x' cannot be evaluated: '<' not supported", "Compare what each job sets"),
        ("'%900000000d' % a == 'x'", "% needs numbers, in the job a=1", "Compare what each job sets"),
        ("'x' * 900000000 == a", "* needs numbers, in the job a=1", "Compare what each job sets"),
        ("a * [1] == a", "* needs numbers, in the job a=1", "Compare what each job sets"),
        ("a / 0 > 1", "division by zero, in the job a=1", "Compare what each job sets"),
    ],
)
def test_conditions_that_are_refused(text: str, problem: str, remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        condition(text, "a").holds({"a": 1}, ["a=1"])
    assert caught.value.key == "x"
    assert problem in caught.value.problem
    assert remedy in str(caught.value.remedy)


HOSTILE = """__import__('os') | a.__class__ | ''.join | (1).real | __builtins__ | print | (lambda: a)() | a[0] | {a}
{a: 1} | a ** 9 ** 9 | a << 99 | a & 1
~a | +a | a @ a | f'{a}' | a if a else a | (b := a) | [a for _ in a] | [*a] | a is a
(a for _ in a) | 'a'.__class__ | [a, [a.b]] | a < (a or a())"""


@pytest.mark.parametrize("text", [part.strip() for part in HOSTILE.replace("\n", "|").split("|")])
def test_nothing_else_of_python_is_evaluated(text: str) -> None:
    with pytest.raises(UserError, match=r"x: .*(cannot be part of a condition|is unknown here|is not a)"):
        condition(text, "a")


def test_a_condition_reads_only_keys_and_constants() -> None:
    found = condition("a.b == 1 or c in (null, [true, 'x']) and -a.b // 2 < 3", "a.b", "c")
    assert set(found._code.co_names) == {"a.b", "c", "null", "true"}
    assert found.holds({"a.b": 9, "c": None}, [])
    with pytest.raises(UserError, match=r"cannot be evaluated: it sets no c, in the job a\.b=2"):
        found.holds({"a.b": 2}, ["a.b=2"])
    assert condition("a == (1, 2)", "a").holds({"a": [1, 2]}, [])

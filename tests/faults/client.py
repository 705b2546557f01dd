"""A client that knows only `--json`: it writes valid command lines, and repairs mistakes by the `command` of errors.

    python -m tests.faults.client [--seed 0] [--lines 200] [--mistakes 60]

It reads groups, options, types, choices and ranges from `--help --json`, and it does not know which mistakes
`mistakes.py` plants. It repairs a line by running the `command` of its error, at most three times, until the dry run is
accepted; *as before*: that line is the one without the mistake. Some valid lines need that, too: options that exclude
each other. Prints a Markdown table. The exit code is 1 if more lines than a tenth of the mistakes stay refused.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tests.e2e.projects import Project
from tests.faults import mistakes, tables
from tests.faults.answers import asker

START = ["python", "train.py", "--json"]
LISTS = ("hooks", "default_hooks", "scheduler")
"""Groups from which several options are selected: `'hooks=[ema,tta]'`."""
STEPS = 3
ENDS = ("as before", "changed", "without a command", "not accepted")
"""How a repair ends: with the line before the mistake, with another line that is accepted, because an error has no
command, or with a line that is still refused after all steps."""


def whole(words: Sequence[str]) -> list[str]:
    """Return the command whose answer shows that a line is accepted: a dry run, or the command that the line names."""
    return [*START, "--dry-run", *words] if words[0] != "hydraloop" else ["python", "-m", *words, "--json"]


class Client:
    """Writes command lines and repairs them.

    Args:
        ask: runs a command, and returns its answer.
        draw: makes all choices.
    """

    def __init__(self, ask: Callable[[Sequence[str]], dict[str, Any]], draw: random.Random) -> None:
        self.ask, self.draw = ask, draw
        self.groups = ask([*START, "--help"])["groups"]

    def lines(self) -> Iterator[list[str]]:
        """Yield flags and overrides: options of groups, hooks and keys; every third line is a sweep."""
        while True:
            selected, keys = self._selected()
            own = [key for key in keys if key.startswith(LISTS)]
            for number in range(4):
                chosen = {*self.draw.sample(sorted(keys), 2), *self.draw.sample(own, min(2, len(own)))}
                values = {key: self._value(keys[key]) for key in sorted(chosen)}
                if number == 0:
                    key = self.draw.choice(sorted(values))
                    values[key] = ",".join({values[key]: 1, self._value(keys[key]): 1, keys[key]["value"]: 1})
                yield ["-m"] * (number == 0) + [*selected, *(f"{key}={value}" for key, value in values.items())]

    def repaired(self, command: list[str]) -> tuple[list[str], dict[str, Any] | None]:
        """Run corrected commands until one is accepted. Return the last one, and its error."""
        for step in range(STEPS + 1):
            error = self.ask(command).get("error")
            if error is None or not error["command"] or step == STEPS:
                break
            command = error["command"]
        return command, error

    def _selected(self) -> tuple[list[str], dict[str, Any]]:
        """Return options of one or two groups that fit together, and the row of each key that they give."""
        while True:
            groups = self.draw.sample(sorted(self.groups), self.draw.randint(1, 2))
            selected = [f"{group}={self._option(group)}" for group in groups]
            keys = self.ask([*START, "--help", "all", *selected]).get("keys", {})
            if keys:
                return selected, {key: row for key, row in keys.items() if row["value"][:2] not in ("**", "${")}

    def _option(self, group: str) -> str:
        options = sorted(self.groups[group])
        if group not in LISTS:
            return self.draw.choice(options)
        return f"[{','.join(self.draw.sample(options, self.draw.randint(0, 2)))}]"

    def _value(self, row: dict[str, Any]) -> str:
        """Return a value by choices, type and range; the present one if these do not tell."""
        schema, kinds = row["schema"], row["type"].split(" or ")
        choices = [choice for part in (schema, *schema.get("anyOf", [])) for choice in part.get("enum", [])]
        if choices:
            return str(self.draw.choice(choices) or "null")
        if "bool" in kinds:
            return self.draw.choice(["true", "false"])
        if not {"int", "float"} & {*kinds} or (row["value"] == "null" and self.draw.random() < 1 / 2):
            return str(row["value"]).replace(" ", "")
        least = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
        value = float(least if row["value"] == "null" else row["value"])
        value = min(self.draw.choice([value, 2 * value, least]), schema.get("maximum", value * 2))
        return f"{value:.0f}" if "int" in kinds else f"{value:g}"


def main(seed: int = 0, lines: int = 200, planted: int = 60, every: int = 10) -> int:
    """Print the table. Returns the exit code."""
    draw, counts = random.Random(seed), Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as folder:
        ask = asker(Project.make(Path(folder) / "project"), every)
        client = Client(ask, draw)
        written = list(islice(client.lines(), lines))
        good = [line for line in written if _counted(client, counts, "valid line", line, line)]
        for kind, line, wrong in mistakes.drawn(good, draw):
            if sum(counts.values()) == lines + planted:
                break
            if "error" in ask(whole(wrong)):  # otherwise, what was planted is no mistake
                _counted(client, counts, kind, line, wrong)
    tables.head("kind", "count", "accepted", "as before", *ENDS[2:])
    for kind in ["valid line", *mistakes.KINDS, "all mistakes"]:
        kinds = mistakes.KINDS if kind == "all mistakes" else [kind]
        found = [sum(counts[one, end] for one in kinds) for end in ENDS]
        tables.row(kind, sum(found), found[0] + found[1], found[0], *found[2:])
    print(f"\nSeed {seed}.")
    return int(sum(counts[kind, end] for kind, end in counts if end in ENDS[2:]) > planted / 10)


def _counted(client: Client, counts: Counter[tuple[str, str]], kind: str, line: list[str], wrong: list[str]) -> bool:
    """Let the client repair a line, and return whether it is accepted as it was before the mistake."""
    command, error = client.repaired(whole(wrong))
    end = ENDS[{*command} != {*whole(line)}] if error is None else ENDS[2 + bool(error["command"])]
    if end != ENDS[0]:
        print(f"{kind}: {end}: {shlex.join(wrong)}\n  {shlex.join(command)}\n  {error}", file=sys.stderr, flush=True)
    counts[kind, end] += 1
    return end == ENDS[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--mistakes", type=int, default=60)
    args = parser.parse_args()
    sys.exit(main(args.seed, args.lines, args.mistakes))

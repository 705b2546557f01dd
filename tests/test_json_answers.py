"""Answers in JSON: one document on standard output, whatever else prints."""

from __future__ import annotations

import json
import subprocess
import sys

from hydraloop import json_answers

PRINTS_AS_WELL = """
import os, subprocess
from hydraloop import json_answers
with json_answers.reserved(["--json"]):
    print("a library prints")
    os.system("echo a process prints")
    json_answers.write("status", {"value": float("nan"), "typed": ["hooks.wandb.api_key=hunter2-0123456789"]})
print("after it")
"""


def test_only_the_answer_is_on_standard_output() -> None:
    done = subprocess.run([sys.executable, "-c", PRINTS_AS_WELL], capture_output=True, text=True, check=True)
    answer, after = done.stdout.splitlines()
    typed = ["hooks.wandb.api_key=***"]
    assert json.loads(answer) == {"schema": json_answers.SCHEMA, "command": "status", "value": "nan", "typed": typed}
    assert (after, done.stderr.splitlines()) == ("after it", ["a library prints", "a process prints"])

"""The layout: eight floors, and the places that start a process."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_calls_of_import_module_point_downwards_as_imports_do() -> None:
    """`lint-imports` does not see them. A name that is not constant is not followed."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    floors = {
        name.strip(): floor for floor, names in enumerate(contract["layers"]) for name in re.split(r"[|:]", names)
    }

    def floor_of(module: str) -> int:
        return next((floors[name] for name in sorted(floors, reverse=True) if f"{module}.".startswith(f"{name}.")), 0)

    upwards = []
    for path in (ROOT / "hydraloop").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _last_name(node.func) == "import_module":
                target = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
                if not isinstance(target, str) or not target.startswith("hydraloop."):
                    continue
                if target.split(".")[1] != module.split(".")[1] and floor_of(target) <= floor_of(module):
                    upwards.append(f"{module} -> {target}")
    assert upwards == []


def _last_name(node: ast.AST) -> str:
    """`b` of `a.b`, and of `b`. Other nodes have none."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


BORN = {
    "launch/start_ranks.py elastic_launch": "the ranks of a run",
    "launch/slurm_nodes.py run": "srun, which starts this command on several nodes",
    "launch/detach.py Popen": "the same command without its terminal",
    "sweeps/executors/fork_server.py Process": "the server of the pool, and its jobs",
    "sweeps/executors/spawned.py Popen": "jobs of the pool that are new Python processes",
    "sweeps/executors/ray_actor.py Popen": "jobs on Ray",
    "sweeps/executors/submitit_executor.py _submit_command": "jobs on Slurm",
    "tracking/start_sender.py Popen": "the sender of a run or a sweep",
    "launch/slurm.py run": "a question to Slurm",
    "sweeps/executors/gpus.py run": "nvidia-smi",
    "files/environment.py run": "git",
}
"""Where a process starts, and which."""


def test_every_place_that_starts_a_process_is_known() -> None:
    starts = {"Popen", "Process", "fork", "execv", "execve", "elastic_launch", "start_processes", "_submit_command"}
    found = set()
    for path in (ROOT / "hydraloop").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) or (isinstance(node, ast.Name) and node.id == "start_processes"):
                called = node.func if isinstance(node, ast.Call) else node
                name, module = _last_name(called), _last_name(getattr(called, "value", called))
                is_start = name in starts and module != "psutil"
                if is_start or (module == "subprocess" and name in ("run", "call", "check_call", "check_output")):
                    found.add(f"{path.relative_to(ROOT / 'hydraloop')} {name}")
    assert found == set(BORN)

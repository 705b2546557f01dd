"""`hydraloop schema`: an editor marks mistakes in config files, and nothing in correct ones."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hydraloop.commands import schema
from hydraloop.commands.new import templates
from tests.e2e.projects import REPOSITORY, Project

SERVER = REPOSITORY / ".venv/language-server/node_modules/yaml-language-server/bin/yaml-language-server"
"""`scripts/language_server.sh` installs it."""
HEAD = "# yaml-language-server: $schema=../.hydraloop/schema/config.json\n"
needs_server = pytest.mark.skipif(not SERVER.exists(), reason="yaml-language-server is not installed")


class LanguageServer:
    """The server as an editor uses it, over standard input and output."""

    def __init__(self) -> None:
        command = ["node", str(SERVER), "--stdio"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._number = 0
        self._request("initialize", {"processId": None, "rootUri": None, "capabilities": {}})
        self._send({"method": "initialized", "params": {}})

    def marks(self, path: Path) -> list[str]:
        """Open a file, and return the messages at what the server marks in it, each with its line."""
        document = {"uri": path.as_uri(), "languageId": "yaml", "version": 1, "text": path.read_text(encoding="utf-8")}
        self._send({"method": "textDocument/didOpen", "params": {"textDocument": document}})
        while True:
            message = self._receive()
            if message.get("method") == "textDocument/publishDiagnostics" and message["params"]["uri"] == path.as_uri():
                return [
                    f"{one['range']['start']['line'] + 1}: {one['message']}" for one in message["params"]["diagnostics"]
                ]

    def has_changed(self, path: Path) -> None:
        """Say that a file has changed, as an editor does."""
        changes = [{"uri": path.as_uri(), "type": 2}]
        self._send({"method": "workspace/didChangeWatchedFiles", "params": {"changes": changes}})

    def _request(self, method: str, params: Mapping[str, Any]) -> None:
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        while self._receive().get("id") != self._number:
            pass

    def _send(self, message: Mapping[str, Any]) -> None:
        content = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.process.stdin is not None
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
        self.process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        length = 0
        while (line := self.process.stdout.readline().strip()) or not length:
            assert line or self.process.poll() is None, "the server has ended"
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        message: dict[str, Any] = json.loads(self.process.stdout.read(length))
        if "id" in message and "method" in message:  # the server asks for settings and registers what it can
            self._send({"id": message["id"], "result": [{}] * len(message.get("params", {}).get("items", []))})
        return message


def written(project: Project, name: str, text: str) -> Path:
    """A new file of a project."""
    project.write(name, text)
    return project.path / name


@pytest.fixture(scope="module")
def server() -> Iterator[LanguageServer]:
    started = LanguageServer()
    yield started
    started.process.kill()
    started.process.communicate()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = Project(tmp_path_factory.mktemp("schema"))
    done = made.python("-m", "hydraloop", "new", "mine")
    assert done.code == 0, done.text
    return Project(made.path / "mine")


def test_the_options_and_keys_of_a_project_are_in_its_schema(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    project.write("conf/config.yaml", "defaults: [hydraloop/project, _self_]\nsamples: 3\nhoks: [ema]\n")
    project.write("conf/site/home.yaml", "folder: /data\n")
    assert project.python("-m", "hydraloop", "schema").code == 0
    found = {path.stem: json.loads(path.read_text()) for path in (project.path / schema.FOLDER).iterdir()}
    top = found["config"]["properties"]
    assert set(top) - set(schema.json_schema()["properties"]) == {"defaults", "samples", "site"}  # without the mistake
    assert set(top["hooks"]["properties"]["weight_norm"]["properties"]) >= {"digits", "priority"}
    entries = top["defaults"]["items"]["patternProperties"]
    (options,) = [entry["anyOf"][0]["enum"] for pattern, entry in entries.items() if "?site(" in pattern]
    assert options == ["home", None]
    assert "folder" in found["site"]["properties"]
    assert "experiment" not in found
    project.write("conf/other.yaml", "seed: {a: ???}")
    done = project.python("-m", "hydraloop", "schema")
    assert (done.code, "error: " in done.err, "Traceback" in done.err) == (2, True, False)
    (project.path / "conf/other.yaml").unlink()
    done = project.python("-m", "hydraloop", "schema", "--group", "hook", "--json")
    assert json.loads(done.out)["error"]["command"][-3:] == ["--group", "hooks", "--json"]


def test_the_line_for_the_editor_is_after_the_package(tmp_path: Path) -> None:
    line = "# yaml-language-server: $schema="
    assert schema.with_modeline("conf/config.yaml", "seed: 1\n") == f"{HEAD}seed: 1\n"
    of_hook = schema.with_modeline("conf/hooks/a.yaml", "# @package hooks.a\n_target_: b.C\n")
    assert of_hook == f"# @package hooks.a\n{line}../../{schema.FOLDER}/hooks.json\n_target_: b.C\n"
    of_experiment = schema.with_modeline("conf/experiment/a.yaml", "# @package _global_\nseed: 1\n")
    assert of_experiment == f"# @package _global_\n{line}../../{schema.FOLDER}/config.json\nseed: 1\n"
    assert schema.with_modeline("data/a.yaml", "") == ""


MISTAKES = {
    # in conf/config.yaml: (line, what its mark says)
    "engine: {max_epoch: 3}": "Property max_epoch is not allowed",
    "optimzer: {lr: 1}": "Property optimzer is not allowed",
    "engine: {max_epochs: ten}": "Expected: whole number",
    "engine: {max_epochs: 0}": "Value is below the minimum of 1",
    "engine: {deterministic: 3}": "Incorrect type",
    "seed: [1]": "Incorrect type",
    "weights: rw": "Value is not accepted",
    "hooks: {ema: {on_error: explode}}": "Value is not accepted",
    "hooks: {ema: {momentm: 0.1}}": "Property momentm is not allowed",
    "hooks: {weight_norm: {intervall: 3}}": "Property intervall is not allowed",
    "hooks: [ema]": "Incorrect type",
    "optimizer: sgd": "Expected: mapping",
    "optimizer: {lrr: 0.1}": "Incorrect type",
    "scheduler: {plateau: {threshold_mode: relative}}": "Value is not accepted",
    "defaults: [hydraloop/project, _self_, override hooks: [emaa]]": "Value is not accepted",
    "defaults: [hydraloop/project, _self_, override hoks: [ema]]": "not allowed",
}
CORRECT = """
seed: ${oc.env:SEED,0}
experiment_name: 5
secrets: ${names}
names: [pin]
load_from: ???
engine: {max_epochs: "???", max_iters: "${seed}", deterministic: "${true}"}
optimizer: {lr: 1e-3, momentum: 0.9, betas: [0.9, "${seed}"]}
scheduler: {cosine: {begin: 1}, mine: {begin: 2}, linear: null}
hooks: {ema: null, weight_norm: {interval: 3, priority: 30}, other: {_target_: hooks.WeightNorm, any: 1}}
default_hooks: {checkpoint: {_target_: hooks.Mine, anything: 1}, logger: null}
data: {train: {_target_: data.Spirals, samples: 9}, train_loader: {batch_size: 8}}
task: {model: {_target_: model.Net, depth: 3}, metrics: {accuracy: {top_k: 5}}}
hydra: {run: {dir: outputs/mine}}
"""


@pytest.mark.slow
@needs_server
def test_an_editor_marks_mistakes_and_nothing_else(server: LanguageServer, project: Project) -> None:
    for index, (line, mark) in enumerate(MISTAKES.items()):
        path = written(project, f"conf/wrong_{index}.yaml", f"{HEAD}{line}\n")
        marks = server.marks(path)
        assert [one for one in marks if one.startswith("2: ") and mark in one], (line, marks)
    own = written(project, "conf/correct.yaml", f"{HEAD}{CORRECT}")
    assert [one for one in server.marks(own) if "names" not in one] == []
    assert project.python("-m", "hydraloop", "schema").code == 0  # now with the key `names` of the new file
    server.has_changed(project.path / schema.FOLDER / "config.json")
    copy = written(project, "conf/correct_2.yaml", f"{HEAD}{CORRECT}")
    assert server.marks(copy) == []
    text = "# @package hooks.wrong\n_target_: hooks.Mine\non_error: explode\n"
    wrong = written(project, "conf/hooks/wrong.yaml", schema.with_modeline("conf/hooks/wrong.yaml", text))
    assert len(server.marks(wrong)) == 1


@pytest.mark.slow
@needs_server
@pytest.mark.parametrize("template", [*templates(), "this repository"])
def test_an_editor_marks_nothing_in_examples(template: str, server: LanguageServer, tmp_path: Path) -> None:
    folder = Project(tmp_path)
    if template == "this repository":
        project = Project.make(tmp_path / "made")
        for path in sorted((project.path / "conf").rglob("*.yaml")):
            name = str(path.relative_to(project.path))
            path.write_text(schema.with_modeline(name, path.read_text(encoding="utf-8")), encoding="utf-8")
        schema.write(project.path)
    else:
        assert folder.python("-m", "hydraloop", "new", "made", "--from", template).code == 0
    files = sorted((tmp_path / "made" / "conf").rglob("*.yaml"))
    assert files
    for file in files:
        assert "yaml-language-server" in file.read_text(encoding="utf-8")
        assert server.marks(file) == [], file

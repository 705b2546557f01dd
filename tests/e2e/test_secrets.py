"""Secrets typed, or taken from the environment: they reach the user's objects, and nothing that is written."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.e2e.projects import Project, Run

TYPED, FROM_ENVIRONMENT = "hunter2/hunter2", "correct-horse-9"
HOOKS = '''
from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from hydraloop import Hook
from my_project.data import Spirals

log = logging.getLogger(__name__)


class Service(Hook):
    """Uses a secret; tells the world about it, too."""

    priority = 10

    def __init__(self, *, api_key: str, url: str = "", fail: bool = False, **ordinary) -> None:
        self.api_key, self.url, self.fail = api_key, url, fail

    def before_run(self, engine) -> None:
        seen = [hashlib.sha256(text.encode()).hexdigest() for text in (self.api_key, self.url)]
        if folder := os.environ.get("HYDRALOOP_NODE"):  # a rank
            seen += [folder, oct(os.stat(folder).st_mode), Path("/proc/self/cmdline").read_text().replace("\\0", " ")]
        (engine.run_dir / f"seen{engine.distributed.rank}").write_text("\\n".join(seen))
        log.info("connecting with %s", self.api_key)
        log.info("going to %s", self.url.rpartition(":")[2])

    def after_train_iter(self, engine, batch_idx, batch, outputs) -> None:
        if self.fail and engine.distributed.rank == engine.distributed.world_size - 1:
            raise RuntimeError(f"no entry with {self.api_key}")


class Private(Spirals):
    """A data set that needs a token."""

    def __init__(self, *, api_token: str, **options) -> None:
        super().__init__(**options)
'''
CHANGED = "user.yaml"
"""A file of the user's, in git, with a secret that is not committed."""
QUICK = ("experiment=spirals", "engine.max_epochs=1", "engine.test=false")
HOOK = "+hooks.mine._target_=my_project.service.Service"
KEY = f"+hooks.mine.api_key={TYPED}"
ORDINARY = {
    "gt_key": "masks",
    "key": "image",
    "sort_key": "name",
    "attention_token": "cls",
    "prompt_token": "<image>",
    "num_tokens": 5,
    "start_token": "<s>",
    "password_strength.minimum": "good",
    "password_strength.words": ["password", "secret"],
    "glob_pat": "*.png",
}
"""Options that are not secrets, although their names look like it."""
SECRET = {
    **{name: f"hunter2-{name}" for name in ("bot_token", "pwd", "passphrase", "dsn", "connection_string", "ssh_key")},
    "my_token": "hunter2-0123456789",
}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A user's project with the classes above."""
    made = Project.make(tmp_path / "project")
    made.write("my_project/service.py", HOOKS)
    return made


def leaks(project: Project) -> list[str]:
    """Files of the project with one of the secrets in them, whole or in part."""
    secret = re.compile(rb"hunter2|horse-9")
    files = [project.path / name for name in project.files]
    there = [path for path in files if path.is_file() and ".git" not in path.parts]
    return [str(path) for path in there if secret.search(path.read_bytes()) and path.name not in (CHANGED, "team.yaml")]


def seen(run: Run, rank: int = 0) -> list[str]:
    """What the hook has noted of its arguments."""
    return (run.path / f"seen{rank}").read_text().splitlines()


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def test_no_file_of_a_run_has_a_secret(project: Project) -> None:
    url = "https://me:hunter2-url@host/"
    options = [f"+hooks.mine.{name}={json.dumps(value)}" for name, value in {**ORDINARY, **SECRET}.items()]
    _commit_then_change(project, CHANGED, f"login: {FROM_ENVIRONMENT}\n")
    commands = [
        [
            *QUICK,
            HOOK,
            KEY,
            "experiment_name=of-${oc.env:MY_SECRET_TOKEN}",
            *options,
            f"+hooks.mine.url={url}",
            "default_hooks.checkpoint.published_keys=[meta,state_dict]",
        ],
        [*QUICK, HOOK, "+hooks.mine.api_key=${oc.env:MY_SECRET_TOKEN}", "+hooks.mine.fail=true"],
        [*QUICK, HOOK, KEY, "+hooks.mine.fail=true"],
        ["-m", *QUICK, HOOK, f"+hooks.mine.api_key={TYPED},hunter2-other", "+engine.no_such=1"],
        ["-m", *QUICK, HOOK, f"+hooks.mine.api_key={TYPED},hunter2-other"],
    ]
    done = project.many(commands, MY_SECRET_TOKEN=FROM_ENVIRONMENT)
    assert [one.code for one in done] == [0, 1, 1, 2, 0], [one.text for one in done]
    project.write("printed.txt", "".join(one.text for one in done))
    assert leaks(project) == []

    whole, failed, again = project.runs
    assert seen(whole) == [digest(TYPED), digest(url)]
    assert [seen(job)[0] for job in project.jobs] == [digest(TYPED), digest("hunter2-other")]
    assert whole.config.hooks.mine.api_key == "***"
    assert whole.config.hooks.mine.url == "https://me:***@host/"
    assert {name: OmegaConf.select(whole.config.hooks.mine, name) for name in ORDINARY} == ORDINARY
    overrides: Any = OmegaConf.to_container(OmegaConf.load(whole.path / ".hydra" / "overrides.yaml"))
    shown = [f"+hooks.mine.{name}=***" for name in ("api_key", *SECRET)]
    assert [line for line in overrides if "=" in line and line.split("=")[1] == "***"] == shown
    assert "+hooks.mine.api_key=***" in overrides
    meta = torch.load(whole.path / "checkpoints" / whole.checkpoints[0], weights_only=True)["meta"]
    kept = OmegaConf.create(meta["config"]).hooks.mine
    assert kept.api_key == "***"
    assert meta["experiment_name"] == "of-***"
    assert {name: OmegaConf.select(kept, name) for name in ORDINARY} == ORDINARY
    assert "connecting with ***" in whole.log
    assert "going to ***@host/" in whole.log  # a password in a URL is known, too
    assert "+login: ***" in (whole.path / "code.patch").read_text()
    assert whole.result["git"].keys() == {"commit", "dirty", "patch"}

    assert seen(failed)[0] == digest(FROM_ENVIRONMENT)
    config = (failed.path / ".hydra" / "config.yaml").read_text()
    assert "${oc.env:MY_SECRET_TOKEN}" in config  # it says where the secret is
    assert failed.result["error"] == "RuntimeError: no entry with ***"
    assert "Traceback" in failed.log
    assert "no entry with ***" in failed.log
    assert "no entry with ***" in again.log
    (sweep,) = project.path.glob("multirun/*/*")
    assert "+hooks.mine.api_key=***" in (sweep / "sweep.json").read_text()
    assert "job 0 (+hooks.mine.api_key=***) started\n" in done[4].out


def _commit_then_change(project: Project, name: str, text: str) -> None:
    project.write(name, "login: none\n")
    project.commit()
    project.write(name, text)


def test_what_is_shown_of_a_config_has_no_secret(project: Project) -> None:
    project.write("conf/team/team.yaml", TEAM)
    typed = "+hooks.other={_target_:my_project.service.Service,api_key:hunter2-typed}"
    commands = [["--dry-run"], ["--cfg", "job"]]
    for done in project.many([[*line, "+team=team", typed] for line in commands]):
        assert done.code == 0
        assert "db_pwd: '***'" in done.out or "db_pwd: ***" in done.out
        assert "hunter2" not in done.text


@pytest.mark.slow
def test_a_run_with_a_secret_in_its_data_is_found_again(project: Project) -> None:
    data = ("data.train._target_=my_project.service.Private", f"+data.train.api_token={TYPED}")
    first, second = project.many([[*QUICK, *data], [*QUICK[::2], *data, "engine.max_epochs=2", "resume=auto"]])
    assert (first.code, second.code) == (0, 0), first.text + second.text
    assert project.run.result["progress"]["epoch"] == 2
    assert (project.run.path / ".hydra" / "resume_1" / "config.yaml").exists()
    assert leaks(project) == []


TEAM = """
# @package _global_
hooks:
  mine:
    _target_: my_project.service.Service
    api_key: none
    db_pwd: hunter2-of-the-team
"""


@pytest.mark.slow  # two processes that import torch
def test_no_file_of_a_run_of_two_ranks_has_a_secret(project: Project) -> None:
    done = project.train(*QUICK, "distributed.nproc_per_node=2", HOOK, KEY, "+hooks.mine.fail=true")
    assert done.code == 1
    assert "hunter2" not in done.text
    assert leaks(project) == []
    run = project.run
    assert run.result["error"] == "rank 1: RuntimeError: no entry with ***"
    assert "no entry with ***" in (run.path / "rank1.log").read_text()
    for rank in (0, 1):
        key, _, folder, mode, command_line = seen(run, rank)
        assert key == digest(TYPED)
        assert mode == "0o40700"  # their errors are their user's alone
        assert " +hooks.mine.api_key=*** " in command_line
        assert not Path(folder).exists()
    assert json.loads((run.path / "result.json").read_text())["status"] == "failed"


LISTENING = """
import json

from hydraloop.launch import torchrun

from my_project.service import Service


class Listening(Service):
    def before_run(self, engine) -> None:
        super().before_run(engine)
        plan = torchrun.of_this_start(torchrun.connect()).get("plan")
        (engine.run_dir / f"store{engine.distributed.rank}").write_bytes(plan)
"""


@pytest.mark.slow  # two processes that import torch
def test_the_store_of_torchrun_has_no_secret(project: Project) -> None:
    """Anybody on the network can read that store. A secret that was typed works on each rank."""
    project.write("my_project/listening.py", LISTENING)
    line = [*QUICK, "+hooks.mine._target_=my_project.listening.Listening", KEY, "+hooks.mine.fail=true"]
    line += ["+hooks.mine.url=ab://me:${hooks.mine.api_key}@host"]
    done = project.python("-m", "torch.distributed.run", "--nproc-per-node=2", "train.py", *line)
    assert done.code == 1
    assert "no entry with ***" in done.err
    assert "hunter2" not in done.text
    run = project.run
    for rank in (0, 1):
        assert seen(run, rank)[:2] == [digest(TYPED), digest(f"ab://me:{TYPED}@host")]
        plan = json.loads((run.path / f"store{rank}").read_text())
        assert plan.keys() == {"run_dir", "paths", "resolved", "digests"}
    assert leaks(project) == []

"""The command lines of the design, in real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.projects import Done, Project, Run

QUICK = "engine.max_epochs=1"
SHORT = "engine.limit_train_batches=5"
EXPENSIVE = (
    "torchmetrics",
    "sklearn",
    "torch._dynamo",
    "mlflow",
    "wandb",
    "tensorboard",
    "matplotlib",
    "optuna",
)
PROBE = """
import atexit, json, pathlib, sys

def write():
    pathlib.Path("modules.json").write_text(json.dumps(sorted(sys.modules)))

atexit.register(write)
import hydraloop

if __name__ == "__main__":
    hydraloop.main()
"""
PROBES = """
import json, pathlib, sys
import hydraloop

codes = []
for line in json.load(sys.stdin):
    sys.argv = ["train.py", *line]
    try:
        hydraloop.main()
        codes.append(0)
    except SystemExit as error:
        codes.append(error.code or 0)
pathlib.Path("modules.json").write_text(json.dumps([codes, sorted(sys.modules)]))
"""


def modules_after(project: Project, *arguments: str) -> tuple[Done, set[str]]:
    """`train.py …`, and the names in `sys.modules` at its end."""
    project.write("probe.py", PROBE)
    done = project.python("probe.py", *arguments, stdin="")  # a real start
    modules = set(json.loads((project.path / "modules.json").read_text(encoding="utf-8")))
    return done, modules


def order_in(text: str) -> list[str]:
    """The lines of hooks by mount point, spaces folded."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return [line for line in lines if re.match(r"(before|after|on)_\w+ \w+ \(\d+\)", line)]


# Single runs. --------------------------------------------------------------------------------------------------------


def test_both_hooks_train_in_one_run(project: Project) -> None:
    line = ["hooks=ema,profiler", "engine.max_epochs=2", "default_hooks.checkpoint.save_best=auto"]
    done, dry = project.many([line, ["--dry-run", *line]])
    assert (done.code, dry.code) == (0, 0), done.text
    run, result = project.run, project.run.result
    assert list(run.config.hooks) == ["ema", "profiler"]
    assert (result["status"], result["progress"]["epoch"], result["progress"]["iteration"]) == ("finished", 2, 40)
    assert 0.5 < result["test_metrics"]["accuracy"] <= 1
    assert result["best"]["metric"] == "accuracy"
    assert Path(project.path, result["best"]["checkpoint"]).exists()

    name = str(run.path.relative_to(project.path))
    assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-\w{6}", name)
    for file in (".hydra/config.yaml", ".hydra/overrides.yaml", "train.log", "metrics.jsonl", "result.json"):
        assert (run.path / file).is_file(), file
    assert (run.path / "tf_tracing_logs").is_dir()
    assert any(file.startswith("best_accuracy") for file in run.checkpoints)
    assert {"epoch_1.pth", "epoch_2.pth"} <= set(run.checkpoints)

    assert done.text.count("read as a list: hooks=[ema,profiler]") == 1
    for shown in ("parameters", "lr ", "eta ", "time ", "data ", "memory ", "ui.perfetto.dev", name):
        assert shown in done.out, shown
    for shown in ("accuracy", "hooks      in the order they are called"):
        assert shown in done.out
        assert shown in run.log
    assert len(order_in(dry.out)) > 10
    assert order_in(dry.out) == order_in(done.out)


def test_a_run_with_a_time_limit_ends_well_and_can_be_continued(project: Project) -> None:
    limits = ["engine.limit_train_batches=3", "engine.limit_val_batches=0.5"]
    done = project.train(*limits, "engine.max_epochs=100000", "engine.max_time=0.3")
    assert done.code == 0, done.text
    assert "stopping: engine.max_time=0.3" in done.text
    first = project.run.result
    assert (first["status"], first["reason"]) == ("stopped", "engine.max_time=0.3")
    assert "accuracy" in first["val_metrics"]
    assert "accuracy" in first["test_metrics"]
    epochs = first["progress"]["epoch"] + 2
    done = project.train(*limits, "resume=auto", f"engine.max_epochs={epochs}")
    assert done.code == 0, done.text
    assert project.run.result["status"] == "finished"
    assert project.run.result["progress"]["iteration"] == 3 * epochs


SINGLE = {
    "changed and removed": ["default_hooks.checkpoint.interval=2", "~default_hooks.logger", "engine.max_epochs=3"],
    "custom hook": [
        "default_hooks.checkpoint=null",
        "+hooks.mine._target_=my_project.hooks.MyHook",
        "+hooks.mine.priority=30",
        QUICK,
    ],
    "custom model and data": ["experiment=spirals", "hooks=weight_norm", "engine.max_epochs=2"],
    "regression": ["experiment=diabetes", "debug=fast"],
    "odd (1), lr=1": [QUICK, "engine.test=false"],
}


def test_hooks_models_data_and_tasks_of_a_project_train(project: Project) -> None:
    """Each in the directory of its name."""
    done = project.many([[*line, f"hydra.run.dir='my runs/{name}'"] for name, line in SINGLE.items()])
    assert [one.code for one in done] == [0] * len(SINGLE), done
    changed, hook, model, _, _ = done
    runs = {name: Run(project.path / "my runs" / name) for name in SINGLE}
    assert {run.result["status"] for run in runs.values()} == {"finished"}

    assert not (runs["changed and removed"].path / "metrics.jsonl").exists()
    assert runs["changed and removed"].checkpoints == ["epoch_2.pth", "epoch_3.pth"]
    assert "logger" not in changed.out
    assert not (runs["custom hook"].path / "checkpoints").exists()
    assert "epoch 1: weight norm" in hook.out
    assert "mine (30)" in hook.out
    assert "SpiralNet" in model.out
    assert "epoch 2: weight norm" in model.out
    assert list(runs["regression"].result["test_metrics"]) == ["mae", "loss"]


def test_from_another_directory_the_files_go_to_the_working_directory(project: Project, tmp_path: Path) -> None:
    elsewhere = Project(tmp_path / "elsewhere")
    elsewhere.path.mkdir()
    done = elsewhere.python(str(project.path / "train.py"), "experiment=spirals", QUICK)
    assert done.code == 0, done.text
    assert elsewhere.run.result["status"] == "finished"
    assert project.runs == []


# What is instant. ----------------------------------------------------------------------------------------------------


def test_torch_is_not_imported_and_nothing_is_written(project: Project) -> None:
    """The first in an interpreter of its own, with all that is imported; the others one after the other in one."""
    project.write("probe.py", PROBE)
    before = project.files
    done, modules = modules_after(project, "--help")
    assert (done.code, "Traceback" in done.text) == (0, False), done.text
    assert done.text.strip()
    assert not {"torch", "numpy", *EXPENSIVE} & modules
    assert project.files - before == {"modules.json"}
    lines = [
        ["hooks=emaa"],
        ["-h"],
        ["--dry-run", "hooks=ema,profiler"],
        ["--dry-run", "+hooks.mine._target_=my_project.hooks.MyHook"],
        ["seed=1", "--dry-run", "hooks=[],[ema]", "--multirun", "engine.max_epochs=1,2"],
        ["--cfg", "job", "hooks=ema,profiler"],
        ["-c", "job", "--resolve"],
        ["--version"],
    ]
    project.write("probes.py", PROBES)
    done = project.python("probes.py", stdin=json.dumps(lines))
    assert "Traceback" not in done.text
    codes, found = json.loads((project.path / "modules.json").read_text(encoding="utf-8"))
    assert codes == [2, *([0] * (len(lines) - 1))], done.text
    assert not {"torch", "numpy", *EXPENSIVE} & set(found)
    assert project.files - before == {"modules.json", "probes.py"}


def test_what_they_print(project: Project) -> None:
    dry, shown, resolved, completed = project.many(
        [
            ["--dry-run", "hooks=ema,profiler", "+hooks.mine._target_=my_project.hooks.MyHook"],
            ["--cfg", "job", "hooks=ema,profiler"],
            ["--cfg", "job", "--resolve", "+my.epochs=${engine.max_epochs}"],
            ["--cfg", "job", "-cn", "other"],
        ]
    )
    assert "ema (50)" in dry.out
    (after_epoch,) = re.findall(r"^  after_train_epoch .*", dry.out, re.M)
    assert "mine (60)" in after_epoch, "mount points and priority are read from its source"
    assert "Nothing was trained or written." in dry.out
    assert "hooks:\n  ema:\n    _target_: hydraloop.hooks.EMAHook" in shown.out
    assert "  profiler:" in shown.out
    assert "epochs: 20" in resolved.out.partition("\nmy:")[2]
    assert completed.code == 2
    assert "the config 'other' does not exist" in completed.err


def test_a_reader_that_ends_is_no_error(project: Project) -> None:
    """`| head`. The pipe has no reader from the beginning."""
    reader, writer = os.pipe()
    os.close(reader)
    lines = (["--help"], ["--cfg", "job"], ["--dry-run"], ["resume", "--help"])
    commands = [[sys.executable, "train.py", *line] for line in lines]
    processes = [
        subprocess.Popen(line, cwd=project.path, stdout=writer, stderr=subprocess.PIPE, text=True) for line in commands
    ]
    os.close(writer)
    assert [process.communicate(timeout=60)[1] for process in processes] == [""] * len(lines)
    assert {process.returncode for process in processes} == {-signal.SIGPIPE}


@pytest.mark.slow
def test_other_configs_and_folders(project: Project) -> None:
    project.write("conf/other.yaml", "defaults: [config, _self_]\nseed: 5\n")
    project.write("second/config.yaml", (project.path / "conf" / "config.yaml").read_text() + "seed: 6\n")
    project.write("more/experiment/mine.yaml", "# @package _global_\nseed: 7\n")
    done = project.many(
        [
            ["--cfg", "job", "-cn", "other"],
            ["--cfg", "job", "-cp", "second"],
            ["--cfg", "job", "-cd", "more", "experiment=mine"],
            ["--cfg", "job", "--config-name=other", "hooks=ema,profiler"],
            ["--help", "experiment", "-cd", "more"],
        ]
    )
    assert [one.code for one in done] == [0] * 5, done
    assert ["seed: 5" in done[0].out, "seed: 6" in done[1].out, "seed: 7" in done[2].out] == [True] * 3
    assert "profiler:" in done[3].out
    assert "mine " in done[4].out


@pytest.mark.slow
def test_a_default_run_imports_only_what_it_uses(project: Project) -> None:
    done, modules = modules_after(project, QUICK, SHORT)
    assert done.code == 0, done.text
    assert "torch" in modules
    assert not set(EXPENSIVE) & modules


# Sweeps. -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_comma_sweeps_if_the_config_file_says_so(project: Project) -> None:
    config = (project.path / "conf" / "config.yaml").read_text()
    project.write("conf/config.yaml", f"{config}\nhydra: {{mode: MULTIRUN}}\n")
    done = project.train("hooks=ema,weight_norm", QUICK, SHORT, "engine.test=false", "hydra.sweep.dir=sweep")
    assert done.code == 0, done.text
    assert "read as a list" not in done.text
    jobs = [Run(project.path / "sweep" / name) for name in ("0", "1")]
    assert [list(job.config.hooks) for job in jobs] == [["ema"], ["weight_norm"]]
    assert not (project.path / "sweep" / "2").exists()


# Resuming. -----------------------------------------------------------------------------------------------------------


def test_resuming_the_newest_run_in_its_own_directory(project: Project) -> None:
    quick = ["engine.test=false", SHORT]
    begun = project.many([["engine.max_epochs=2", *quick], ["experiment=spirals", "engine.max_epochs=1", *quick]])
    assert [done.code for done in begun] == [0, 0], begun
    first = project.runs[0]
    before = first.records
    done = project.train("engine.max_epochs=3", *quick, "resume=auto")
    assert done.code == 0, done.text
    assert len(project.runs) == 2, "it continues in the same directory"
    after = first.records
    # A checkpoint is written before its epoch is validated: a resumed run first makes that up, and has it once.
    assert before[-1]["mode"] == "val"
    assert after[: len(before) - 1] == before[:-1]
    assert [record["epoch"] for record in after[len(before) - 1 :] if record["mode"] == "val"] == [2, 3]
    assert first.checkpoints == ["epoch_1.pth", "epoch_2.pth", "epoch_3.pth"]
    assert first.result["progress"]["epoch"] == 3
    # The run directory, then one of its checkpoints.
    named = (first.path.relative_to(project.path), first.path / "checkpoints" / "epoch_3.pth")
    resumed = project.many([[f"resume={path}", "engine.max_epochs=4", *quick] for path in named])
    assert [done.code for done in resumed] == [0, 0], resumed
    assert "epoch_4.pth" in first.checkpoints
    assert len(project.runs) == 2
    validated = [record["epoch"] for record in first.records if record["mode"] == "val"]
    assert validated == [1, 2, 3, 4], "each once, however often it is resumed"
    # Another directory named besides is refused.
    done = project.train(f"resume={first.path}", "hydra.run.dir=elsewhere")
    assert done.code == 2
    assert "hydra.run.dir: a resumed run continues in its own directory" in done.err
    assert "load_from=" in done.err


def test_resuming_in_a_directory_that_the_config_file_names(project: Project) -> None:
    config = (project.path / "conf" / "config.yaml").read_text()
    project.write("conf/config.yaml", f"{config}\nhydra: {{run: {{dir: 'runs/${{experiment_name}}'}}}}\n")
    line = ["engine.test=false", SHORT, "resume=auto"]
    done = project.train("engine.max_epochs=1", *line)
    assert done.code == 0, done.text
    assert done.err.count("runs/digits has no checkpoint: a new run starts there") == 1
    run = Run(project.path / "runs" / "digits")
    assert run.result["progress"]["epoch"] == 1
    done = project.train("engine.max_epochs=2", *line)
    assert done.code == 0, done.text
    assert "a new run starts there" not in done.text
    assert run.checkpoints == ["epoch_1.pth", "epoch_2.pth"]
    assert [record["epoch"] for record in run.records if record["mode"] == "val"] == [1, 2]


@pytest.mark.slow
def test_an_option_of_a_hook_that_every_swept_set_has(project: Project) -> None:
    done = project.train("-m", "hooks=[ema],[ema,weight_norm]", "hooks.ema.priority=30", "engine.max_iters=1")
    assert done.code == 0, done.text
    assert [sorted(job.config.hooks) for job in project.jobs] == [["ema"], ["ema", "weight_norm"]]
    assert [job.config.hooks.ema.priority for job in project.jobs] == [30, 30]


BIG = """
from hydraloop import Hook

class Big(Hook):
    def before_train(self, engine):
        raise ValueError("first\\n" + "x" * 500_000 + "\\nlast")
"""


@pytest.mark.slow
@pytest.mark.parametrize("line", ["-m seed=0,1", "hydra.run.dir=outputs/a/b distributed.nproc_per_node=2"])
def test_a_long_error_is_whole_in_the_log_only(line: str, project: Project) -> None:
    project.write("my_project/big.py", BIG)
    done = project.train(
        *line.split(), "experiment=spirals", "engine.max_iters=1", "+hooks.big._target_=my_project.big.Big"
    )
    assert done.code == 1
    assert "ValueError: first\n" in done.text
    assert "characters are left out: the log has them" in done.text
    assert len(done.text) < 40_000
    large = {path.name for name in project.files if (path := project.path / name).stat().st_size > 20_000}
    assert "train.log" in large
    assert not [name for name in large if name.endswith((".json", ".csv", "job.log"))]


def test_jobs_do_not_share_a_directory(project: Project) -> None:
    done = project.train("-m", "seed=1,2", "hydra.sweep.subdir=same", QUICK, SHORT)
    assert done.code == 1
    assert "hydra.sweep.subdir" in done.err
    assert "${hydra.job.num}" in done.err
    (sweep,) = project.path.glob("multirun/*/*")
    assert "error: 1 of 2 jobs failed: job 1 (seed=2)\n" in done.err
    assert Run(sweep / "same").result["status"] == "finished", "the first one's"


# Several data sets. ---------------------------------------------------------------------------------------------------

SETS = """# @package data
defaults: [base, _self_]
train: {_target_: hydraloop.data.Digits, split: train}
val:
  small: {_target_: hydraloop.data.Digits, split: val}
  large: {_target_: hydraloop.data.Digits, split: test}
test:
  one: {_target_: hydraloop.data.Digits, split: val}
  two: {_target_: hydraloop.data.Digits, split: test}
"""


def test_what_is_refused(project: Project) -> None:
    project.write("conf/data/two.yaml", SETS.replace("small:", "sm/all:"))
    project.write("conf/data/forgotten.yaml", SETS.replace("_target_: hydraloop.data.Digits, split: val", "split: val"))
    named, forgotten, share = project.many(
        [["data=two"], ["data=forgotten"], ["engine.overfit_batches=2.5"]],
    )
    assert "data.val: 'sm/all' is not a name for a data set" in named.text
    assert "data.val.small: there is nothing to build" in forgotten.text
    assert "engine.overfit_batches: 2.5 is neither a number of batches nor a share of them" in share.text
    assert (named.code, forgotten.code, share.code) == (1, 1, 2)


def test_signs_that_a_terminal_cannot_show_are_replaced(project: Project) -> None:
    """Help, a dry run, a run and the table of a sweep end as usual. The files of the run have the signs."""
    ascii_only = "import sys\nfor stream in (sys.stdout, sys.stderr):\n    stream.reconfigure(encoding='ascii')\n"
    project.write("train.py", ascii_only + (project.path / "train.py").read_text())  # as with PYTHONIOENCODING=ascii
    short, name = [QUICK, SHORT, "engine.test=false"], "experiment_name='Łódź'"
    run, sweep = [*short, "hydra.run.dir=outputs/signs", name], ["-m", *short, f"{name},'Vögel'"]
    for line in (["--help"], ["--dry-run", name], run, sweep):
        done = project.train(*line)
        assert done.code == 0, done.text
        assert done.text.isascii()
        assert "UnicodeEncodeError" not in done.text
    assert Run(project.path / "outputs" / "signs").config.experiment_name == "Łódź"

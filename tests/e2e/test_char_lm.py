"""`experiment=char_lm` with a small model, and text from it by sample.py."""

from __future__ import annotations

import math
import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.char_lm.python_sources import PythonSources
from tests.e2e.projects import REPOSITORY, Project

SAMPLE = REPOSITORY / "examples" / "char_lm" / "sample.py"
TINY = (
    "experiment=char_lm",
    "hooks=[ema]",
    "data.train.block_size=32",
    "data.train.megabytes=0.2",
    "data.val.megabytes=0.02",
    "data.test.megabytes=0.02",
    "task.model={layers: 1, width: 32, heads: 2}",
    "engine.max_iters=200",
    "engine.val_interval=100",
    "engine.threads=1",
    "data.loader.batch_size=16",
    "optimizer.lr=1e-2",
    "default_hooks.checkpoint.interval=100",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with one run of a second."""
    project = Project.make(tmp_path_factory.mktemp("char_lm") / "project")
    done = project.train(*TINY)
    assert done.code == 0, done.text
    return project


@pytest.fixture(scope="module")
def script() -> Any:
    """sample.py as a module, which avoids importing torch again."""
    spec = spec_from_file_location("sample", SAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bits_of_single_bytes() -> float:
    """Bits per byte of the test part if only the frequency of each byte is known: the best without any context."""
    counts = torch.bincount(PythonSources("test", 32, megabytes=0.02).blocks.flatten().to(torch.int64)).double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log2()).sum())


# Training. -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_learns_more_than_how_often_bytes_occur(trained: Project) -> None:
    result = trained.run.result
    assert result["status"] == "finished"
    assert result["progress"]["iteration"] == 200
    metrics = result["test_metrics"]
    assert list(metrics) == ["bits_per_token", "accuracy", "loss"]
    assert metrics["bits_per_token"] < bits_of_single_bytes() - 0.5
    assert metrics["bits_per_token"] == pytest.approx(metrics["loss"] / math.log(2), rel=1e-5)
    assert 0.25 < metrics["accuracy"] < 1


def test_the_record_has_the_mean_loss_of_a_byte(trained: Project) -> None:
    losses = [record["loss"] for record in trained.run.records if "loss" in record]
    assert losses[0] == pytest.approx(math.log(256), abs=1.0), "the mean, not the sum over a batch"
    assert losses[-1] < losses[0] - 1


def test_validation_and_checkpoints_are_by_iteration(trained: Project) -> None:
    assert trained.run.checkpoints == ["iter_100.pth", "iter_200.pth"]
    assert trained.run.result["val_metrics"]["bits_per_token"] < 8


def test_the_context_and_the_held_out_parts_follow_the_train_part(trained: Project) -> None:
    checkpoint = torch.load(trained.run.path / "checkpoints" / "iter_200.pth", weights_only=True)
    assert checkpoint["state_dict"]["position_embedding.weight"].shape == (32, 32)
    assert checkpoint["meta"]["config"].count("block_size: 32") == 3


@pytest.mark.nightly
def test_half_of_the_experiment_gets_below_three_bits(project: Project) -> None:
    done = project.train("experiment=char_lm", "engine.max_iters=600", "engine.val_interval=null")
    assert done.code == 0, done.text
    assert project.run.result["test_metrics"]["bits_per_token"] < 3


# Sampling. -----------------------------------------------------------------------------------------------------------


def test_the_script_prints_text(trained: Project) -> None:
    arguments = ["--prompt", "def ", "--length", "200", "--seed", "3"]
    done = trained.python(str(SAMPLE), str(trained.run.path), *arguments)
    assert done.code == 0, done.text
    assert done.out.startswith("def ")
    assert 150 < len(done.out) <= 205
    assert len(set(done.out)) > 10
    assert done.err == ""


def text(script: Any, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert script.main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_seed_gives_the_same_text_and_another_one_another(
    trained: Project, script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(trained.run.path)
    texts = [text(script, capsys, run, "--length", "60", "--seed", seed) for seed in ("0", "0", "1")]
    assert texts[0] == texts[1] != texts[2]
    greedy = [text(script, capsys, run, "--length", "40", "--temperature", "0", "--seed", seed) for seed in ("0", "1")]
    assert greedy[0] == greedy[1]
    assert text(script, capsys, run, "--length", "40", "--top-k", "1") == greedy[0]


def test_the_newest_checkpoint_is_taken_and_the_average_unless_raw_is_wanted(trained: Project, script: Any) -> None:
    newest = trained.run.path / "checkpoints" / "iter_200.pth"
    checkpoint = torch.load(newest, weights_only=True)
    for weights, expected in (("averaged", checkpoint["hooks"]["ema"]["averaged"]), ("raw", checkpoint["state_dict"])):
        for path in (trained.run.path, newest):
            state = script.load_model(path, weights).state_dict()
            assert all(torch.equal(state[name], value) for name, value in expected.items())
    earlier = torch.load(newest.with_name("iter_100.pth"), weights_only=True)["hooks"]["ema"]["averaged"]
    state = script.load_model(newest.with_name("iter_100.pth")).state_dict()
    assert all(torch.equal(state[name], value) for name, value in earlier.items())


def test_an_empty_prompt_begins_a_file(trained: Project, script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    written = text(script, capsys, str(trained.run.path), "--prompt", "", "--length", "30")
    assert "\0" not in written
    assert len(written) >= 20


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--length", "0"], "0 is below 1"),
        (["--length", "2.5"], "'2.5' is not a whole number"),
        (["--temperature", "-1"], "-1 is below 0"),
        (["--temperature", "nan"], "nan is not a number"),
        (["--top-k", "0"], "0 is below 1"),
        (["--weights", "best"], "invalid choice"),
    ],
)
def test_options_out_of_range(arguments: list[str], said: str, script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        script.main(["somewhere", *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_paths_that_hold_no_such_model(
    trained: Project, script: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "bare.pth")
    (tmp_path / "empty").mkdir()
    for name, old, new in (
        ("cut", "", ""),
        ("other", "examples.char_lm.gpt.GPT", "hydraloop.models.SmallCNN"),
        ("refused", "examples.char_lm.gpt.GPT", "torch.load"),
        ("larger", "width: 32", "width: 64"),
        ("words", "vocab_size: 256", "vocab_size: 999"),
    ):
        run = shutil.copytree(trained.run.path, tmp_path / name)
        config = run / ".hydra" / "config.yaml"
        config.write_text(config.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    (tmp_path / "cut" / "checkpoints" / "iter_200.pth").write_text("no checkpoint")
    weights = torch.load(trained.run.path / "checkpoints" / "iter_200.pth", weights_only=True)
    for entries in (weights["state_dict"], weights["hooks"]["ema"]["averaged"]):
        entries.update({name: torch.zeros(999, 32) for name in entries if name.startswith(("token", "head"))})
    torch.save(weights, tmp_path / "words" / "checkpoints" / "iter_200.pth")
    for name, said in (
        ("nothing", "is not in a run directory"),
        ("empty", "is not a run directory"),
        ("bare.pth", "is not in a run directory"),
        ("cut/checkpoints/iter_200.pth", "is not a complete checkpoint"),
        ("other", "SmallCNN takes no argument"),
        ("refused", "task.model"),
        ("larger", "do not fit the model GPT"),
        ("words", "a GPT of 999 tokens"),
    ):
        assert script.main([str(tmp_path / name)]) == 1
        printed = capsys.readouterr()
        assert printed.err.startswith("error: ")
        assert said in printed.err
        assert printed.out == ""

"""WandbTracker with the real library: offline files are read back, and each record is there once after any kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hydraloop.files.metrics_log import FILENAME, count
from hydraloop.tracking import run_description
from hydraloop.tracking.tracker import Run, Sweep
from hydraloop.tracking.wandb import mode_of  # here, not in a test: the import sets variables of W&B
from hydraloop.tracking.wandb_run import config_of, names
from tests.marks import nightly, slow
from tests.small_disk import small_disk
from tests.tracking.runs import attempt, described_run

ROOT = Path(__file__).resolve().parents[3]
KEY = "c0ffee00" * 5
"""It looks like an API key."""
NOWHERE = "http://127.0.0.1:9"


def drive(
    run_dir: Path,
    *actions: str,
    dies: bool = False,
    env: dict[str, str] | None = None,
    mode: str | None = "offline",
    init: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A follower's process that performs actions, with a closed stdin and without the user's W&B settings.

    Args:
        mode: of `wandb.init`. None: W&B decides.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    home = run_dir.parent / "home"
    home.mkdir(exist_ok=True)
    options["init"] = {**({} if mode is None else {"mode": mode}), **(init or {})}
    if mode is None:
        options = {"flush_timeout": 30.0, **options}
    done = subprocess.run(
        [sys.executable, "-m", "tests.tracking.wandb.driver", str(run_dir), json.dumps(options), *actions],
        env={**clean, "HOME": str(home), **(env or {})},
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == (9 if dies else 0), done.stderr
    return None if dies else json.loads(done.stdout.splitlines()[-1])


def rows_of(found: Any) -> list[dict[str, Any]]:
    """The rows of the only offline file."""
    (contents,) = found["files"].values()
    return list(contents["rows"])


def test_each_record_is_a_row_and_the_end_is_told(tmp_path: Path) -> None:
    """Steps are lines and the axis is the iteration. The run is described by its own command, host, commit and times.

    `sync` changes nothing then.
    """
    run_dir = tmp_path / "run"
    config = "optimizer: {lr: 0.1}\nbetas: [0.9, .nan]\ntoken: '***'\n"
    command = {"command": "python train.py 'hooks=[wandb]' optimizer.lr=0.1", "host": "there", "git_commit": "c0ffee"}
    began = time.time() - 86_400
    described_run(run_dir, replace(attempt(), config=config, tags=command, began=began))
    best = {"metric": "accuracy", "value": 0.5, "iteration": 20, "checkpoint": "nowhere.pth"}
    (run_dir / "result.json").write_text(json.dumps({"status": "finished", "best": best}))
    for index in range(3):
        append(run_dir, {"mode": "train", "epoch": 1, "iteration": 10 * index, "loss": 1.0}, began + 10 * index)

    found = drive(run_dir, "drain", "log=2", "drain", "fail", "read")

    (contents,) = found["files"].values()
    rows = contents["rows"]
    assert [(row["step"], row["iteration"], row["epoch"]) for row in rows] == [
        (0, 0, 1), (1, 10, 1), (2, 20, 1), (3, 40, 1), (4, 50, 1),
    ]  # fmt: skip
    assert [row["train/loss"] for row in rows] == [1.0, 1.0, 1.0, 1 / 40, 1 / 50]
    assert [row["_timestamp"] for row in rows[:3]] == pytest.approx([began, began + 10, began + 20], abs=0.01)
    assert contents["metrics"] == {"iteration": "", "*": "iteration"}
    assert (contents["exit"], contents["summary"]["status"]) == (1, "failed")
    assert contents["summary"]["error"] == "ValueError: no"
    assert contents["summary"]["best"] == {"metric": "accuracy", "value": 0.5, "iteration": 20}
    assert (contents["summary"]["train/loss"], contents["summary"]["val/accuracy"]) == (1 / 50, 0.5)
    assert "result.json" in contents["files"]
    shown = contents["config"]
    assert (shown["optimizer"], shown["betas"], shown["token"]) == ({"lr": 0.1}, [0.9, "NaN"], "***")
    assert shown["hydraloop"]["command"] == command["command"]
    about = {"program": "train.py", "args": ["hooks=[wandb]", "optimizer.lr=0.1"], "host": "there"}
    assert (contents["environment"], contents["commit"]) == (about, "c0ffee")
    assert (contents["id"], contents["project"]) == ("0123456789abcdef", "digits")
    assert (contents["group"], contents["name"]) == ("", "a/run")
    assert "stats" not in contents
    assert found["where"] == f"wandb sync {run_dir / 'wandb' / next(iter(found['files']))}"
    assert (found["sent"], found["finished"]) == (5, True)

    again = drive(run_dir, "fail", "read", _sync=True)
    assert (again["files"], again["where"]) == (found["files"], found["where"])


@pytest.mark.slow
def test_a_killed_core_loses_nothing(tmp_path: Path) -> None:
    """Killed between batches, and again before the end: one trouble each, and one complete file in the end."""
    run_dir = tmp_path / "run"
    described_run(run_dir)
    found = drive(run_dir, "log=500", "drain", "kill", "notice", "drain", "kill", "finish", "read")
    records = count(run_dir / FILENAME)
    assert [row["step"] for row in rows_of(found)] == list(range(records))
    assert len([trouble for trouble in found["troubles"] if trouble]) == 2
    assert found["troubles"][-1] is None
    assert (found["sent"], found["finished"]) == (records, True)


@pytest.mark.slow
def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """W&B's process reports no error, and writes nothing after its first one: the file is written again."""
    with small_disk(tmp_path / "disk", 4) as disk:
        run_dir = disk / "run"
        described_run(run_dir)
        found = drive(run_dir, "log=400", "step", "fill", "free", "drain", "finish", "read")
    assert any("was the disk full?" in str(trouble) for trouble in found["troubles"])
    assert [row["step"] for row in rows_of(found)] == list(range(400))
    assert (found["sent"], found["finished"]) == (400, True)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["killed", "finished"])
def test_a_directory_that_is_synced_while_its_run_writes_is_an_error(tmp_path: Path, when: str) -> None:
    """`wandb sync` leaves a mark. W&B cannot continue the file."""
    run_dir = tmp_path / "run"
    described_run(run_dir)
    if when == "killed":
        drive(run_dir, "log=20", "drain", "die", dies=True)
        (folder,) = (run_dir / "wandb").glob("offline-run-*")
        (folder / "run-0123456789abcdef.wandb.synced").touch()
        found = drive(run_dir, "log=5", "step")
        assert found["states"] == ["given up"]
    else:
        found = drive(run_dir, "log=25", "drain", "upload", "finish")
        (folder,) = (run_dir / "wandb").glob("offline-run-*")
    assert "uploaded by `wandb sync` before its end" in found["troubles"][-1]
    assert "records after that are only in metrics.jsonl" in found["troubles"][-1]


def append(run_dir: Path, record: dict[str, Any], timestamp: float) -> None:
    """Append a record that was written at a given time."""
    with (run_dir / FILENAME).open("a") as file:
        file.write(json.dumps({**record, "timestamp": round(timestamp, 3)}) + "\n")


@pytest.mark.slow
def test_odd_records_and_names(tmp_path: Path) -> None:
    """NaN and infinity, odd names, texts, a record of another mode, and secrets."""
    run_dir = tmp_path / "run"
    described_run(run_dir)
    given = {"notes": "password=hunter2hunter2", "tags": ["token=zzzzzzzzzz"]}
    odd = {"mode": "val", "epoch": 2, "iteration": 7, 'a.b/c d"?': 1, "ü": 2, "note": "text"}
    nonfinite = {"mode": "train", "iteration": 7, "x": float("nan"), "y": float("-inf")}
    records = [odd, nonfinite, {"mode": "train", "note": "password=hunter2hunter2"}, {"mode": "mine", "v": 1}]
    actions = [f"odd={json.dumps(record)}" for record in records]

    found = drive(run_dir, *actions, "drain", "finish", "read", init=given)

    rows = rows_of(found)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert {name: rows[0][name] for name in ('val/a.b/c d"?', "val/ü", "val/note", "epoch")} == {
        'val/a.b/c d"?': 1, "val/ü": 2, "val/note": "text", "epoch": 2,
    }  # fmt: skip
    assert rows[1]["train/x"] != rows[1]["train/x"]
    assert rows[1]["train/y"] == float("-inf")
    assert rows[2]["train/note"] == "password=***"
    assert (rows[3]["mine/v"], rows[3]["iteration"]) == (1, 7)
    assert (found["refused"], found["sent"]) == ([], 4)
    (contents,) = found["files"].values()
    assert (contents["tags"], contents["notes"]) == (["token=***"], "password=***")


@pytest.mark.slow  # some seconds, of a rare case
def test_objects_stand_at_their_step(tmp_path: Path) -> None:
    """All kinds, under the name that they have in every tracker. Damaged files give one warning; records are sent."""
    from PIL import Image

    run_dir = tmp_path / "run"
    described_run(run_dir)
    Image.new("RGB", (4, 4)).save(run_dir / "a.png")
    (run_dir / "broken.png").write_bytes((run_dir / "a.png").read_bytes()[:40] + b"x" * 40)
    (run_dir / "note.txt").write_text("a < b")
    (run_dir / "table.json").write_text(json.dumps({"columns": ["a", "b"], "rows": [[1, "x"], ["2", None]]}))
    counted = {"min": 0.0, "bucket_limit": [1.0, 2.0], "bucket": [3, 4]}
    (run_dir / "counts.json").write_text(json.dumps({"weights/a": counted, "empty": {**counted, "bucket": []}}))
    (run_dir / "report.txt").write_text("report")
    objects = [
        ("image", "picture", "a.png"), ("text", "note", "note.txt"), ("table", "table", "table.json"),
        ("histogram", "weights", "counts.json"), ("artifact", "report", "report.txt"),
        ("image", "gone", "gone.png"), ("image", "broken", "broken.png"), ("table", "odd", "note.txt"),
    ]  # fmt: skip
    for kind, name, path in objects:
        record = {"mode": "val", "epoch": 1, "iteration": 5, "objects": [{"kind": kind, "name": name, "path": path}]}
        append(run_dir, record, time.time())

    found = drive(run_dir, "drain", "finish", "read")

    (contents,) = found["files"].values()
    rows = contents["rows"]
    assert [row["step"] for row in rows] == list(range(8))
    (warning,) = found["warnings"]
    assert warning.startswith("gone.png is not sent to W&B, as others like it will not be")
    assert [rows[n][name]["_type"] for n, name in enumerate(["val/picture", "val/note", "val/table"])] == [
        "image-file", "html-file", "table-file",
    ]  # fmt: skip
    assert rows[3]["weights/a"] == {"_type": "histogram", "values": [3, 4], "bins": [0.0, 1.0, 2.0]}
    assert "empty" not in rows[3]
    assert not any(name.startswith("val/") for row in rows[4:] for name in row)
    assert contents["summary"]["val/table"]["_type"] == "table-file"
    (artifact,) = [one for one in contents["artifacts"] if one["type"] == "file"]
    assert artifact["name"] == "val_report-0123456789abcdef"
    (media,) = run_dir.glob("wandb/offline-run-*/files/media")
    assert len([*media.glob("images/val/picture*.png")]) == 1
    (page,) = media.glob("html/val/note_*.html")
    assert "a &lt; b" in page.read_text()


@pytest.mark.parametrize("which", [slow("all"), nightly("best"), nightly("last")])
def test_checkpoints_are_artifacts(tmp_path: Path, which: str) -> None:
    """The last artifact is the newest file, because W&B moves the alias `latest` to each artifact that it gets."""
    import zipfile

    run_dir = tmp_path / "run"
    described_run(run_dir)
    (run_dir / "checkpoints").mkdir()
    best_one = "best_accuracy_iter_1"
    for age, name in enumerate(("iter_10.pth", f"{best_one}.pth", "iter_9.pth")):
        with zipfile.ZipFile(run_dir / "checkpoints" / name, "w") as file:
            file.writestr("data", name)
        os.utime(run_dir / "checkpoints" / name, (1_700_000_000 - age, 1_700_000_000 - age))
    (run_dir / "checkpoints" / "last_checkpoint").write_text("iter_10.pth\n")
    (run_dir / "checkpoints" / "iter_1.pth").symlink_to("deleted")  # is listed, but cannot be read
    best = {
        "metric": "a",
        "value": 1,
        "iteration": 1,
        "checkpoint": str(run_dir / "checkpoints/best_accuracy_iter_1.pth"),
    }
    (run_dir / "result.json").write_text(json.dumps({"status": "finished", "best": best}))
    env = {"WANDB_DATA_DIR": str(tmp_path / "data"), "WANDB_CACHE_DIR": str(tmp_path / "cache")}

    found = drive(run_dir, "log=3", "drain", "finish", "read", env=env, checkpoints=which)

    (contents,) = found["files"].values()
    sent = [(one["metadata"]["file"], set(one["aliases"])) for one in contents["artifacts"]]
    newest, best_again = ("iter_10.pth", {"latest", "iter_10"}), (f"{best_one}.pth", {"latest", best_one, "best"})
    assert sent == {
        "all": [("iter_9.pth", {"latest", "iter_9"}), (f"{best_one}.pth", {"latest", best_one}), newest,
                best_again, newest],
        "best": [best_again],
        "last": [newest],
    }[which]  # fmt: skip


def test_disabled_makes_nothing_and_says_so(tmp_path: Path) -> None:
    """No file, no process, and no record counts as sent."""
    run_dir = tmp_path / "run"
    described_run(run_dir)
    found = drive(run_dir, "log=3", "step", "close", mode=None, env={"WANDB_MODE": "disabled"})
    assert (found["sent"], found["states"], found["where"]) == (0, ["given up", "0 cores"], None)
    assert found["troubles"] == ["W&B is disabled, by hooks.wandb.init.mode or WANDB_MODE"]
    assert not (run_dir / "wandb").exists()


@pytest.mark.slow
def test_without_a_key_it_is_offline_and_takes_names_from_variables(tmp_path: Path) -> None:
    """Nothing is asked without any configuration. A run's id and folder in the environment are not used."""
    run_dir = tmp_path / "run"
    described_run(run_dir)
    env = {"WANDB_RUN_ID": "of-all", "WANDB_RESUME": "must", "WANDB_DIR": str(tmp_path / "else")}
    names = ("PROJECT", "RUN_GROUP", "JOB_TYPE", "TAGS", "NOTES", "NAME")
    env |= {f"WANDB_{name}": "others" for name in names}
    found = drive(run_dir, "log=3", "drain", "finish", "read", mode=None, env=env)
    (contents,) = found["files"].values()
    assert (contents["id"], len(contents["rows"])) == ("0123456789abcdef", 3)
    assert not (tmp_path / "else").exists()
    named = [contents[key] for key in ("project", "group", "job_type", "tags", "notes", "name")]
    assert named == ["others", "others", "others", ["others"], "others", "others"]

    assert mode_of({"mode": "online"}, "offline") == "offline", "as it began"


def test_online_without_a_key_is_given_up_with_one_message(tmp_path: Path) -> None:
    """Nothing is asked."""
    run_dir = tmp_path / "run"
    described_run(run_dir)
    found = drive(run_dir, "log=3", "step", "close", mode="online")
    assert found["states"] == ["given up", "0 cores"]
    assert "wandb login" in found["troubles"][0]


@pytest.mark.slow  # some seconds, of a rare case
def test_a_name_that_wandb_refuses_is_given_up_with_its_reason(tmp_path: Path) -> None:
    """Once. `sync` with another name sends it."""
    run_dir = tmp_path / "run"
    described_run(run_dir)
    found = drive(run_dir, "log=3", "step", "close", init={"project": "a/b"})
    assert found["states"] == ["given up", "0 cores"]
    assert "W&B refuses an option of hooks.wandb: Invalid project name" in found["troubles"][0]
    assert len(rows_of(drive(run_dir, "drain", "finish", "read", init={"project": "b"}, _sync=True))) == 3


@pytest.mark.parametrize("how", [slow("variable"), nightly("netrc")])
def test_auto_with_a_key_and_no_network_fails_in_bounded_time(tmp_path: Path, how: str) -> None:
    """Nothing is sent, no process remains, and the key is not in any file."""
    run_dir = tmp_path / "run"
    described_run(run_dir)
    netrc = tmp_path / "a_netrc"
    netrc.write_text(f"machine 127.0.0.1:9 login user password {KEY}\n")
    netrc.chmod(0o600)
    env = {"WANDB_API_KEY": KEY} if how == "variable" else {"NETRC": str(netrc)}
    found = drive(
        run_dir, "log=3", "step", "close", mode=None, flush_timeout=1.0, env={"WANDB_BASE_URL": NOWHERE, **env}
    )
    assert (found["states"], found["sent"]) == (["in trouble", "0 cores"], 0)
    assert KEY not in everything_below(run_dir)


def test_a_key_is_never_written(tmp_path: Path) -> None:
    """Neither in the file, its logs, the data of the machine nor `result.json`."""
    run_dir = tmp_path / "run"
    described_run(run_dir)
    (run_dir / "result.json").write_text(json.dumps({"status": "failed", "error": f"no such key: {KEY}"}))
    env = {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}
    drive(run_dir, "log=3", "drain", "finish", "read", mode=None, _measures=True, env=env)
    (run_dir / "result.json").unlink()
    assert "loss" in everything_below(run_dir)
    assert KEY not in everything_below(run_dir)


def everything_below(folder: Path) -> str:
    """The contents of all files."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return "\n".join(path.read_bytes().decode("latin-1") for path in files)


@pytest.mark.slow
def test_jobs_of_a_sweep_are_runs_of_their_own(tmp_path: Path) -> None:
    """By the random id of each, in one group, named by their overrides."""
    found = []
    for job in range(2):
        run_dir = tmp_path / "sweep" / str(job)
        run_dir.mkdir(parents=True)
        sweep = Sweep(tmp_path / "sweep", "feed", "2026-11-21/12-00-00-abcd", job)
        run_description.write(Run(run_dir, f"{job}" * 16, "digits", f"optimizer.lr={job}", (attempt(),), sweep))
        (contents,) = drive(run_dir, "log=1", "drain", "finish", "read", env={"WANDB_RUN_ID": "same"})["files"].values()
        found.append((contents["id"], contents["group"], contents["name"]))
    group = "2026-11-21/12-00-00-abcd"
    assert found == [("0" * 16, group, "optimizer.lr=0"), ("1" * 16, group, "optimizer.lr=1")]


def test_what_each_attempt_changed(tmp_path: Path) -> None:
    """Compared with the attempt before."""
    run = described_run(
        tmp_path, attempt(), attempt(1, 5, **{"optimizer.lr": 0.2}), attempt(2, 9, **{"optimizer.lr": 0.2, "new": 1})
    )
    config = config_of(run)
    assert config["optimizer"] == {"lr": 0.1}
    assert config["resume_1/optimizer/lr"] == 0.2
    assert config["resume_2/new"] == 1
    assert "resume_2/optimizer/lr" not in config


def test_no_name_has_more_than_128_characters(tmp_path: Path) -> None:
    run = Run(tmp_path, "u", "digits", "x" * 200, (attempt(),), Sweep(tmp_path, "s", "the sweep", 0))
    assert names(run) == {"project": "digits", "group": "the sweep", "name": "x" * 128}

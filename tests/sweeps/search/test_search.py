"""A search with played jobs: what it asks for, what it is told, and that each decision can be made again."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hydraloop.commands import dispatch
from hydraloop.errors import UserError
from hydraloop.safety import working_directory
from hydraloop.sweeps import states
from hydraloop.sweeps.search import measures, sampler
from hydraloop.sweeps.search.history import History
from hydraloop.sweeps.search.log import SearchLog
from hydraloop.sweeps.search.sampler import Suggester
from hydraloop.sweeps.search_replay import replay
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.sweeps.search.played import LR, KilledError, Search, distance

ASHA = {"promote": "asha", "trials": 30}


def history_of(search: Search):  # type: ignore[no-untyped-def]  # the type is that of the log
    axes = SweepDirectory.load(search.directory.path).description.axes
    axes.log.refresh()  # type: ignore[union-attr]  # it is a search
    return axes.log.history  # type: ignore[union-attr]


def ends(search: Search) -> Counter[str]:
    return Counter(state.state for state in SweepDirectory.load(search.directory.path).states())


def test_tpe_finds_the_best_value_and_each_decision_can_be_made_again(tmp_path: Path) -> None:
    search = Search(tmp_path, (LR, "hooks=[],[ema]"), {"trials": 40})
    loop = search.run()
    assert (loop.code, loop.left) == (0, [])
    losses = [trial.values[0] for trial in history_of(search).trials]
    assert min(losses[10:]) < 0.05
    assert sum(losses[20:]) / 20 < sum(losses[:10]) / 10 / 2
    again = replay(search.directory)
    assert (again.differing, again.counts) == ([], {"ask": 40, "told": 40})


def test_an_ask_does_not_depend_on_earlier_asks_of_the_process(tmp_path: Path) -> None:
    """A second controller, or one after a kill, asks for the same. More is better here: known from the first result."""
    space, draws = Search(tmp_path).trials.space, random.Random(0)
    history, kept, running = History(), Suggester(space, "tpe", 0), []
    for number in range(25):
        params, attributes = Suggester(space, "tpe", 0).suggest(history, number)
        assert kept.suggest(history, number) == (params, attributes), number
        history.apply({"event": "ask", "trial": number, "params": params, "attributes": attributes})
        running.append(number)
        if number % 3:
            told = {"job": running.pop(draws.randrange(len(running))), "state": "complete", "values": [draws.random()]}
            history.apply({"event": "told", **told, "metrics": ["accuracy"], "rules": ["greater"]})


@pytest.mark.parametrize("options", [{}, ASHA, {"sampler": "nsga2"}, {"sampler": "random"}], ids=str)
def test_under_kills_each_trial_ends_once_and_no_decision_differs(tmp_path: Path, options: dict[str, object]) -> None:
    chance = random.Random(7)
    kills = 0
    search = Search(tmp_path, (LR, "hooks=[],[ema]"), options, validations=9, kills=lambda: chance.random() < 0.1)
    while True:
        try:
            search.run()
            break
        except KilledError:
            kills += 1
    assert kills > 3
    history = history_of(search)
    assert all(trial.state in ("complete", "pruned") for trial in history.trials)
    assert sum(ends(search).values()) == len(history.trials) == search.trials.count
    assert set(ends(search)) <= {"finished", "pruned"}
    assert replay(search.directory).differing == []


def test_trials_that_a_killed_controller_has_asked_for_start_before_new_ones(tmp_path: Path) -> None:
    search = Search(tmp_path, options={"trials": 6}, workers=1)
    search.run()
    log = search.directory.path / "search.jsonl"
    events = [event for event in log.read_text().splitlines(keepends=True) if '"ask"' in event or '"begin"' in event]
    log.write_text("".join(events[:4]))
    for number in range(6):
        (search.directory.folder(number) / "job.json").unlink()
    search = Search(tmp_path, options={"trials": 6}, workers=1)
    search.run()
    assert [number for number, _ in search.started] == [0, 1, 2, 3, 4, 5]


def test_a_changed_result_or_decision_is_found(tmp_path: Path) -> None:
    search = Search(tmp_path, options={"trials": 12})
    search.run()
    log = search.directory.path / "search.jsonl"
    text = log.read_text()
    lr = str(history_of(search).trials[11].params["optimizer.lr"])
    log.write_text(text.replace(lr, "0.05"))
    (found,) = replay(SweepDirectory.load(search.directory.path)).differing
    assert found.startswith("ask 11")


def test_with_asha_a_third_of_each_rung_continues_and_the_others_are_pruned(tmp_path: Path) -> None:
    search = Search(tmp_path, options={**ASHA, "trials": 27}, validations=9)
    search.run()
    history = history_of(search)
    assert len(history.rungs[0]) == 27
    assert 9 <= len(history.rungs[1]) <= 13
    best = sorted(range(27), key=lambda number: history.rungs[0][number])[:3]
    assert all(history.trials[number].rung > 0 for number in best)
    finished = [trial for trial in history.trials if trial.state == "complete"]
    assert 3 <= len(finished) <= 5
    lines = [dict(line.split("=", 1) for line in lines) for number, lines in search.started if number == best[0]]
    assert [line.get("engine.pause_after") for line in lines][:2] == ["1", "3"]
    assert ends(search) == {"finished": len(finished), "pruned": 27 - len(finished)}


def test_a_search_with_few_trials_has_one_that_has_trained_to_its_end(tmp_path: Path) -> None:
    search = Search(tmp_path, options={**ASHA, "trials": 5}, validations=9)
    search.run()
    assert ends(search) == {"finished": 1, "pruned": 4}
    again = replay(search.directory)
    assert (again.differing, again.counts["told"]) == ([], 5)


def test_a_failed_trial_is_not_repeated_by_the_sampler(tmp_path: Path) -> None:
    """Half of the space diverges."""
    search = Search(tmp_path, options={"trials": 40})
    search.loss = lambda values: math.nan if float(values["optimizer.lr"]) > 3e-3 else 1 - float(values["optimizer.lr"])
    search.run()
    states = [trial.state for trial in history_of(search).trials]
    assert states[:10].count("failed") > 1
    assert states[20:].count("failed") < 14
    assert replay(search.directory).differing == []


def test_each_trial_runs_with_all_seeds(tmp_path: Path) -> None:
    search = Search(tmp_path, (LR, "seed=0,1,2"), {"trials": 4})
    search.run()
    assert {number for number, _ in search.started} == set(range(12))
    assert ends(search) == {"finished": 12}
    assert replay(search.directory).differing == []


def test_enqueued_trials_are_first_and_the_sampler_completes_them(tmp_path: Path) -> None:
    options = {"trials": 3, "enqueue": [{"optimizer.lr": 1e-3, "hooks": ["ema"]}, {"hooks": "[]"}]}
    search = Search(tmp_path, (LR, "hooks=[],[ema]"), options)
    search.run()
    trials = history_of(search).trials
    assert trials[0].params == {"optimizer.lr": 1e-3, "hooks": "[ema]"}
    assert trials[1].params["hooks"] == "[]"
    assert trials[2].given is None
    assert replay(search.directory).differing == []
    search = Search(tmp_path / "b", options={"enqueue": [{"optimizer.lr": 1.0}]})
    with pytest.raises(UserError, match=r"1\.0 is not in optimizer\.lr="):
        search.run()


def test_a_search_goes_on_with_more_trials_but_no_other_space_or_sampler(tmp_path: Path) -> None:
    Search(tmp_path, options={"trials": 5}).run()
    search = continued(tmp_path, {"trials": 15})
    search.run()
    assert len(history_of(search).trials) == 15
    assert replay(search.directory).differing == []
    with pytest.raises(
        UserError, match=r"is over optimizer\.lr=.*0\.1\)\); this command line has optimizer\.lr=.*,1\.0\)\)"
    ):
        continued(tmp_path, {"trials": 15}, "optimizer.lr=tag(log,interval(1e-4,1))")
    with pytest.raises(UserError, match="sampler"):
        Search(tmp_path, options={"trials": 15, "sampler": "random"}).run()


def continued(folder: Path, options: dict[str, object], *overrides: str) -> Search:
    search = Search(folder, overrides or (LR,), options)
    description = search.directory.description
    search.directory.widen(replace(description, axes=search.trials.widened(description.axes)))  # type: ignore[arg-type]
    return search


def test_the_start_of_a_controller_waits_until_another_one_has_decided(tmp_path: Path) -> None:
    """Otherwise its settings would not be in the log."""
    search = Search(tmp_path, options={"trials": 5})
    search.run()
    other = SearchLog(search.directory.path, 1)

    def decide() -> None:
        with other.deciding():
            deciding.set()
            time.sleep(0.2)

    deciding, thread = threading.Event(), threading.Thread(target=decide)
    thread.start()
    deciding.wait()
    continued(tmp_path, {"trials": 8}).run()
    thread.join()
    assert replay(search.directory).differing == []


def test_a_search_ends_at_its_target(tmp_path: Path) -> None:
    search = Search(tmp_path, options={"trials": 200, "until": "best < 0.1 or stale > 100"})
    loop = search.run()
    history = history_of(search)
    assert len(history.trials) < 200
    assert SweepDirectory.load(search.directory.path).description.axes.count == len(history.trials)
    assert history.best().values[0] < 0.1
    assert loop.left == []


def test_an_objective_that_no_record_has_ends_the_search_and_can_be_corrected(tmp_path: Path) -> None:
    search = Search(tmp_path, options={"trials": 6, "objectives": {"los": "min"}})
    loop = search.run()
    assert (loop.problem.key, loop.problem.problem) == ("sweep.objectives", "no record of job 0 has los")
    assert ends(search)["running"] == 0
    search = Search(tmp_path, options={"trials": 6, "objectives": {"loss": "min"}})
    assert search.run().left == []
    assert replay(search.directory).differing == []
    with pytest.raises(UserError, match="decides by another value"):
        Search(tmp_path, options={"trials": 6, "objectives": {"loss": "max"}}).run()


def test_a_search_that_continues_does_not_read_the_records_of_earlier_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With objectives it would read `metrics.jsonl` of 10,000 jobs."""
    Search(tmp_path, options={"trials": 6, "objectives": {"loss": "min"}}).run()
    jobs, measure = list[int](), measures.measure
    monkeypatch.setattr(measures, "measure", lambda state, *rest: (jobs.append(state.number), measure(state, *rest))[1])
    Search(tmp_path, options={"trials": 8, "objectives": {"loss": "min"}}).run()
    assert sorted(jobs) == [6, 7]


def test_the_line_of_a_killed_writer_is_written_again(tmp_path: Path) -> None:
    search = Search(tmp_path, options={"trials": 4})
    search.run()
    log = search.directory.path / "search.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    search.run()
    assert log.read_bytes() == b"".join(lines)
    log.write_bytes(b"".join(lines[:2]) + b"{]\n" + b"".join(lines[2:]))
    with pytest.raises(UserError, match=r"line 3 of .* is damaged"):
        search.run()


def test_a_job_that_a_kill_has_left_paused_after_the_decision_to_prune_it_is_pruned(tmp_path: Path) -> None:
    search = Search(tmp_path, options={**ASHA, "trials": 9}, validations=9)
    search.run()
    pruned = next(state for state in search.directory.states() if state.state == "pruned")
    paused = replace(pruned, state="paused", reason="preempted by engine.pause_after=1")
    states.write(search.directory.folder(pruned.number), paused, flush=False)
    assert search.run().left == []
    assert search.directory.state(pruned.number).state == "pruned"


def test_after_many_trials_tpe_knows_the_best_and_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ask then takes as long as with few. It does not depend on earlier asks of the process either."""
    monkeypatch.setattr(sampler, "_BLOCK", 20)
    monkeypatch.setattr(sampler, "_BEST", 5)
    space = Search(tmp_path).trials.space
    history, kept = History(), Suggester(space, "tpe", 0)
    told = {"event": "told", "state": "complete", "metrics": ["loss"], "rules": ["less"]}
    for number in range(75):
        params, attributes = Suggester(space, "tpe", 0).suggest(history, number)
        assert kept.suggest(history, number) == (params, attributes), number
        history.apply({"event": "ask", "trial": number, "params": params, "attributes": attributes})
        if number not in (3, 30):  # they run for long
            history.apply({**told, "job": number, "values": [distance({"optimizer.lr": str(params["optimizer.lr"])})]})
        if number == 67:
            history.apply({**told, "job": 3, "values": [0.0]})
    known = [trial.number for trial in sampler._known_to_sampler(history)]
    assert (len(known), known[5:]) == (5 + 35, list(range(40, 75)))
    assert 3 in known
    assert known[:5] == sorted(known[:5])


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{}",
        '{"event": "ask"}',
        '{"event": "prune", "trial": 99}',
        '{"event": "told", "job": 77, "state": "failed"}',
        '{"event": "begin", "space": {}, "settings": {}}',
        '{"event": "init__"}',
    ],
)
def test_the_log_of_somebody_else_may_have_anything(tmp_path: Path, line: str) -> None:
    search = Search(tmp_path, options={"trials": 2})
    search.run()
    log = search.directory.path / "search.jsonl"
    count = len(log.read_text().splitlines())
    log.write_text(log.read_text() + line + "\n")
    with pytest.raises(UserError, match=f"line {count + 1} of .* is damaged"):
        replay(search.directory)


@pytest.mark.parametrize("target", ["os.mkdir", "sweep.sampler.Sampler"])
def test_the_log_of_somebody_else_runs_no_code(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also not in a trusted working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(working_directory.UNTRUSTED, "1")  # the command sets it
    monkeypatch.setattr(working_directory.ALLOWLIST, "_folders", {tmp_path})
    monkeypatch.setattr(working_directory.ALLOWLIST, "_untrusted", set[Path]())
    search = Search(tmp_path, options={"trials": 2})
    search.run()
    log, ran = search.directory.path / "search.jsonl", tmp_path / "ran"
    (search.directory.path / "sampler.py").write_text(f"import os\nos.mkdir({str(ran)!r})\nSampler = dict\n")
    sampler = json.dumps({"_target_": target, "path": str(ran)})
    log.write_text(log.read_text().replace('"sampler": "tpe"', f'"sampler": {sampler}'))
    assert dispatch.run(["replay", "sweep"]) == 2
    assert "sampler" in capsys.readouterr().err
    assert not ran.exists()

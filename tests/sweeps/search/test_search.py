"""A search with played jobs: what it asks for, and what it is told."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from hydraloop.errors import UserError
from hydraloop.sweeps import job_states, search_sampler
from hydraloop.sweeps.executors.executor import Request
from hydraloop.sweeps.search import Rule
from hydraloop.sweeps.search_history import History, Trial
from hydraloop.sweeps.sweep_directory import Jobs, SweepDirectory
from tests.sweeps.search.played import LR, KilledError, Search, distance

ASHA = {"promote": "asha", "trials": 30}


def ends(search: Search) -> Counter[str]:
    return Counter(state.state for state in SweepDirectory.load(search.directory.path).states())


def test_tpe_finds_the_best_value(tmp_path: Path) -> None:
    search = Search(tmp_path, (LR, "hooks=[],[ema]"), {"trials": 40})
    loop = search.run()
    assert (loop.exit_code, loop.unfinished) == (0, [])
    losses = [trial.values[0] for trial in search.history().trials]
    assert min(losses[10:]) < 0.05
    assert sum(losses[20:]) / 20 < sum(losses[:10]) / 10 / 2


def killed(search: Search, chance: random.Random) -> int:
    """Run a search under kills, and return their number."""
    search.kills, kills = lambda: chance.random() < 0.1, 0
    while True:
        try:
            search.run()
        except KilledError:
            kills += 1
        else:
            return kills


@pytest.mark.parametrize("options", [{}, ASHA, {"sampler": "nsga2"}], ids=str)
def test_with_one_slot_a_search_suggests_the_same_under_kills(tmp_path: Path, options: dict[str, object]) -> None:
    """Each trial ends once. NSGA-II has a second generation: its notes are needed."""
    both = []
    for name in ("quiet", "killed"):
        search = Search(tmp_path / name, (LR, "hooks=[],[ema]"), {"trials": 60, **options}, validations=9, workers=1)
        if name == "killed":
            assert killed(search, random.Random(3)) > 4
        else:
            search.run()
        assert sum(ends(search).values()) == search.search.trials
        assert set(ends(search)) <= {"finished", "pruned"}
        both.append([(trial.params, trial.state, trial.values) for trial in search.history().trials])
    assert both[0] == both[1]


def test_trials_that_a_killed_controller_has_asked_for_start_before_new_ones(tmp_path: Path) -> None:
    search = Search(tmp_path, (LR, "seed=0,1"), {"trials": 3}, workers=1)
    search.kills = lambda: len(search.started) == 2
    with pytest.raises(KilledError):
        search.run()
    job_states.read(search.directory.folder(1))
    (search.directory.folder(1) / "job.json").unlink()  # as if the kill had come earlier
    search = Search(tmp_path, (LR, "seed=0,1"), {"trials": 3}, workers=1)
    search.run()
    assert [number for number, _ in search.started] == [1, 2, 3, 4, 5]


def test_a_failed_job_of_an_earlier_controller_is_retried(tmp_path: Path) -> None:
    """Slurm still has job 0 when the second controller starts. The source does not name the job: there is no room."""
    search = Search(tmp_path, options={"trials": 2}, workers=1, kills=lambda: True)
    with pytest.raises(KilledError):
        search.run()
    ((number, lines),) = search.started
    folder = str(search.directory.folder(number))
    search.kills, search.adopted = lambda: False, {number: Request(number, lines, folder, folder)}
    search.loss = lambda values: distance(values) if len(search.started) > 2 else float("no number")
    search.run(max_retries=1)
    assert [(state.state, state.attempts) for state in search.directory.states()] == [("finished", 2), ("finished", 1)]


def test_with_asha_a_third_of_each_rung_continues_and_the_others_are_pruned(tmp_path: Path) -> None:
    search = Search(tmp_path, options={**ASHA, "trials": 27}, validations=9)
    search.run()
    trials = search.history().trials
    assert all(1 in trial.curve for trial in trials)
    assert 9 <= sum(2 in trial.curve for trial in trials) <= 13
    best = sorted(trials, key=lambda trial: trial.curve[1])[:3]
    assert all(trial.jobs[0].rungs for trial in best)
    finished = [trial for trial in trials if trial.state == "complete"]
    assert 3 <= len(finished) <= 5
    lines = [dict(line.split("=", 1) for line in lines) for number, lines in search.started if number == best[0].number]
    assert [line.get("engine.pause_after") for line in lines][:2] == ["1", "3"]
    assert ends(search) == {"finished": len(finished), "pruned": 27 - len(finished)}
    pruned = [trial for trial in trials if trial.state == "pruned"]
    assert [one.jobs[0].reason for one in pruned] == [f"not promoted at rung {max(one.curve)}" for one in pruned]


def test_a_search_with_few_trials_has_one_that_has_trained_to_its_end(tmp_path: Path) -> None:
    search = Search(tmp_path, options={**ASHA, "trials": 5}, validations=9)
    search.run()
    assert ends(search) == {"finished": 1, "pruned": 4}


def test_a_failed_trial_is_not_repeated_by_the_sampler(tmp_path: Path) -> None:
    """Half of the space diverges."""
    search = Search(tmp_path, options={"trials": 40})
    search.loss = lambda values: math.nan if float(values["optimizer.lr"]) > 3e-3 else 1 - float(values["optimizer.lr"])
    search.run()
    jobs = [trial.state for trial in search.history().trials]
    assert jobs[:10].count("failed") > 1
    assert jobs[20:].count("failed") < 14


def test_a_search_whose_jobs_cannot_be_built_keeps_its_trials(tmp_path: Path) -> None:
    """A failed trial prunes the rest of its jobs; these jobs run too when the search is resumed."""

    def refuse(values: Mapping[str, str]) -> float:
        raise ValueError("no such model")

    search = Search(tmp_path, (LR, "seed=0,1"), {"trials": 3}, workers=1, loss=refuse)
    loop = search.run()
    assert [number for number, _ in search.started] == [0, 2]
    assert loop.unfinished == [0, 1, 2, 3, 4, 5]
    search.loss = distance
    search.run()
    assert ends(search) == {"finished": 6}


def test_enqueued_trials_are_first_and_the_sampler_completes_them(tmp_path: Path) -> None:
    options = {"trials": 3, "enqueue": [{"optimizer.lr": 1e-3, "hooks": ["ema"]}, {"hooks": "[]"}]}
    search = Search(tmp_path, (LR, "hooks=[],[ema]"), options)
    search.run()
    trials = search.history().trials
    assert trials[0].params == {"optimizer.lr": 1e-3, "hooks": "[ema]"}
    assert trials[1].params["hooks"] == "[]"
    assert ["fixed_params" in trial.notes for trial in trials] == [True, True, False]
    search = Search(tmp_path / "b", options={"enqueue": [{"optimizer.lr": 1.0}]})
    with pytest.raises(UserError, match=r"is not a trial of this search: .*1\.0"):
        search.run()


def test_a_search_goes_on_with_more_trials_but_no_other_space_or_sampler(tmp_path: Path) -> None:
    Search(tmp_path, options={"trials": 5}).run()
    search = continued(tmp_path, {"trials": 15})
    search.run()
    assert len(search.history().trials) == 15
    with pytest.raises(UserError, match="the search is over other values"):
        continued(tmp_path, {"trials": 15}, "optimizer.lr=tag(log,interval(1e-4,1))")
    with pytest.raises(UserError, match="sampler"):
        continued(tmp_path, {"trials": 15, "sampler": "random"})


def continued(folder: Path, options: dict[str, object], *overrides: str) -> Search:
    """Another command line of the same search, as `resume_sweep` checks it."""
    search = Search(folder, overrides or (LR,), options)
    stored = search.directory.description.jobs.search
    assert stored is not None
    search.search.check_same(stored)
    search.directory.widen(replace(search.directory.description, jobs=Jobs.of_search(search.search)))
    return search


def test_an_objective_that_no_record_has_ends_the_search(tmp_path: Path) -> None:
    search = Search(tmp_path, options={"trials": 6, "objectives": {"los": "min"}})
    loop = search.run()
    assert loop.problem is not None
    assert (loop.problem.key, loop.problem.problem) == ("sweep.objectives", "job 0 has loss, time, and not los")
    assert ends(search)["running"] == 0


class Broken(optuna.samplers.RandomSampler):
    """Fails at the third trial."""

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        if trial.number == 2:
            raise ZeroDivisionError("no more")
        return super().sample_independent(study, trial, name, distribution)


def test_an_error_in_a_sampler_is_a_problem_and_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs that run end as usual."""
    monkeypatch.setattr(search_sampler, "make", lambda kind, seed: Broken(seed))
    search = Search(tmp_path, options={"trials": 6, "sampler": "random"})
    loop = search.run()
    assert loop.problem is not None
    assert loop.problem.key == "sweep.sampler"
    assert "failed to suggest trial 2: ZeroDivisionError: no more" in loop.problem.problem
    assert ends(search) == {"finished": 2}


def test_cma_es_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pickle"):
        Search(tmp_path, options={"sampler": {"_target_": "optuna.samplers.CmaEsSampler"}}).run()


def test_a_job_whose_file_is_lost_is_failed_and_the_others_keep_their_numbers(tmp_path: Path) -> None:
    Search(tmp_path, options={"trials": 4}).run()
    search = Search(tmp_path, options={"trials": 6})
    (search.directory.folder(1) / "job.json").unlink()
    (search.directory.folder(2) / "job.json").write_text("{")
    search.run()
    assert [number for number, _ in search.started] == [4, 5]
    assert [trial.state for trial in search.history().trials] == ["complete", "failed", "failed", *["complete"] * 3]


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # of Optuna
@pytest.mark.parametrize(("rule", "prune_after"), [("greater", 1), ("less", 3)])
def test_the_median_pruner_is_shown_each_validation_in_turn(tmp_path: Path, rule: Rule, prune_after: int) -> None:
    """Decisions are those of Optuna's own loop, which asks after each report."""
    search = replace(Search(tmp_path).search, prune_after=prune_after)
    draws, history, suggested = random.Random(rule), History(), Counter[bool]()
    history.metrics, history.rules = ("loss",), (rule,)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=prune_after)
    study = optuna.create_study(direction="maximize" if rule == "greater" else "minimize", pruner=pruner)
    for number in range(60):
        theirs, level = study.ask(), draws.gauss(0, 1)
        trial = Trial(number, {"optimizer.lr": 1e-3})
        for validation in range(1, 6):
            value = math.nan if draws.random() < 0.04 else round(level + draws.gauss(0, 0.5), 1)
            trial.curve[validation] = value
            theirs.report(value, validation)
            assert search_sampler.prunes(search, history, trial, trial.curve) == theirs.should_prune()
            suggested[theirs.should_prune()] += 1
        study.tell(theirs, level)
        trial.state, trial.results = "complete", {0: (level,)}
        history.trials.append(trial)
    assert min(suggested.values()) > 40

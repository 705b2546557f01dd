from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from omegaconf import DictConfig

from hydraloop.commands.train import check_command
from hydraloop.config import arguments
from hydraloop.config.compose import Composer, opened
from hydraloop.errors import UserError
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.sweeps import check_sweep
from tests.config.composed import composer


def planned(line: str, composing: Composer) -> tuple[check_sweep.SweepDraft, list[DictConfig]]:
    """The draft of a sweep, and the configs that were checked."""
    checked: list[DictConfig] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_sweep, "check_options", checked.append)
        draft = check_command(arguments.read(line.split()), composing)
    assert isinstance(draft, check_sweep.SweepDraft)
    return draft, checked


def test_each_value_is_checked_once_not_each_combination() -> None:
    with composer() as opened:
        plan, checked = planned("-m seed=1,2,3 engine.max_epochs=4,5,6 sweep.max_workers=2", opened)
    assert [(cfg.seed, cfg.engine.max_epochs) for cfg in checked] == [(1, 4), (2, 4), (3, 4), (1, 5), (1, 6)]
    assert plan.jobs.swept == ("seed", "engine.max_epochs")
    assert (plan.cfg.seed, plan.jobs.count, plan.options.max_workers) == (1, 9, 2)
    assert plan.subdir == "${hydra.job.num}"


def test_the_compared_configs_are_one_for_each_choice_of_options() -> None:
    """Their number is the sum over the axes. A choice of the first job is in its config."""
    with composer() as opened:
        line = "-m hooks=[],[ema] seed=1,2 data=digits,spirals default_hooks.timer=null optimizer=adamw"
        plan, _ = planned(line, opened)
        configs = plan.configs(plan.jobs)
    assert list(configs) == ["", "data=spirals", "hooks=[ema]"]
    assert list(configs["hooks=[ema]"]) == ["hooks.ema"]
    assert configs["data=spirals"]["data.train.samples"] == 900


def test_options_of_another_search_path_are_compared_too(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name in ("a", "b"):
        (tmp_path / "more" / f"{name}.yaml").write_text(f"# @package engine\nthreads: {ord(name)}\n")
    with composer() as opened:
        plan, _ = planned(f"-m +more=a,b hydra.searchpath=[file://{tmp_path}]", opened)
        assert plan.configs(plan.jobs)["+more=b"] == {"engine.threads": 98}


def test_an_axis_of_a_config_file_is_checked_too(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "defaults: [hydraloop, data: digits, model: small_cnn, optimizer: adamw, precision: fp32, _self_]\n"
        "hydra: {sweeper: {params: {seed: '1,x'}}}\n"
    )
    with opened(tmp_path, "config") as composing, pytest.raises(UserError) as caught:
        planned("-m", composing)
    assert caught.value.key == "seed"
    assert "in the job seed=x" in caught.value.problem


@pytest.fixture
def experiments(tmp_path: Path) -> Iterator[Composer]:
    """A project."""
    (tmp_path / "config.yaml").write_text(
        "defaults: [hydraloop, data: digits, model: small_cnn, optimizer: adamw, precision: fp32, _self_]\n"
    )
    with opened(tmp_path, "config") as composing:
        yield composing


def test_what_any_job_needs_of_the_machine_all_get(experiments: Composer) -> None:
    def needs(line: str) -> tuple[int, str]:
        plan, _ = planned(line, experiments)
        return plan.ranks, plan.device

    assert needs("-m engine.device=cpu seed=1,2") == (1, "cpu")
    assert needs("-m engine.device=cpu,cuda,cpu distributed.nproc_per_node=1,4,2") == (4, "cuda")


def test_an_interpolation_is_left_to_the_jobs() -> None:
    with composer() as opened:
        plan, _ = planned("-m seed=1,2 experiment_name=number-${hydra:job.num}", opened)
    assert plan.jobs.listed[1] == ("seed=2", "experiment_name=number-${hydra:job.num}")


def test_results_are_averaged_over_a_key_that_exists() -> None:
    with composer() as opened:
        planned("-m +my.fold=0 sweep.average=my.fold", opened)
        with pytest.raises(UserError, match=r"sweep\.average: there is no such key\n.*Did you mean my\.fold"):
            planned("-m +my.fold=0,1 sweep.average=my.flod", opened)


def test_a_key_that_refers_to_itself_is_one_message() -> None:
    with composer() as opened, pytest.raises(UserError, match=r"^seed: \$\{seed\} does not resolve"):
        planned("-m seed=${seed}", opened)


SUBMITIT = {
    "slurm_setup: ['touch owned']": "slurm_setup",
    "slurm_srun_args: ['--prolog=evil']": "slurm_srun_args",
    "slurm_python: ./evil": "slurm_python",
    "local_setup: ['touch owned']": "local_setup",
    "slurm_mail_user: evil": "slurm_mail_user",
    "slurm_additional_parameters: {nice: 3, wrap: evil}": "slurm_additional_parameters.wrap",
    'slurm_qos: "x\\ntouch P #"': "slurm_qos",
    'slurm_qos: "x\\n"': "slurm_qos",
    'slurm_partition: "${now:%n}touch owned"': "slurm_partition",
    "slurm_constraint: [a, b]": "slurm_constraint",
}
"""Parameters in a config file, and the one that is refused."""


def test_a_config_file_gives_submitit_no_commands(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    for number, written in enumerate(SUBMITIT):
        text = f"# @package sweep.submitit\n{written}\n"
        (tmp_path / "experiment" / f"mine{number}.yaml").write_text(text)
    typed = "-m seed=1,2 sweep.submitit.slurm_additional_parameters.nice=3"
    with sweep_in_a_file(tmp_path, "executor: submitit") as composing:
        for number, name in enumerate(SUBMITIT.values()):
            with pytest.raises(UserError) as caught:
                planned(f"{typed} +experiment=mine{number}", composing)
            key = f"sweep.submitit.{name}"
            assert caught.value.key == key
            assert f"{key}=" in str(caught.value.remedy)
        planned(f"{typed} +experiment=mine{number} {key}=mine", composing)


def test_a_config_file_chooses_harmless_parameters_of_submitit(tmp_path: Path) -> None:
    written = (
        "timeout_min: 5, mem_gb: 1.5, gpus_per_node: 2, nodes: 1, slurm_partition: 'gpu,cpu',"
        " slurm_constraint: '[a*2&b]|c', slurm_time: '1-02:00', slurm_account: me@lab, slurm_exclusive: true,"
        " slurm_qos: null, slurm_gres: 'gpu:a100=1'"
    )
    with submitit_in_a_file(tmp_path, written) as composing:
        planned("-m seed=1,2", composing)


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ("address: 'evil.example.com:6379'", "address"),
        ("runtime_env: {env_vars: {LD_PRELOAD: evil.so}}", "runtime_env.env_vars.LD_PRELOAD"),
        ("num_cpus: '${oc.env:HOME}'", "num_cpus"),
    ],
)
def test_a_config_file_tells_ray_only_what_a_job_reserves(written: str, key: str, tmp_path: Path) -> None:
    with sweep_in_a_file(tmp_path, f"executor: ray, ray: {{num_gpus: 0.5, memory: 8e9, {written}}}") as file:
        with pytest.raises(UserError) as caught:
            planned("-m seed=1,2", file)
        assert caught.value.key == f"sweep.ray.{key}"
        planned(f"-m seed=1,2 sweep.ray.{key}=1", file)


def test_main_can_trust_all_parameters_of_submitit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ALLOWLIST, "_trusted", {"submitit"})
    with submitit_in_a_file(tmp_path, "slurm_setup: ['module load cuda']") as composing:
        planned("-m seed=1,2", composing)


@contextmanager
def submitit_in_a_file(folder: Path, parameters: str) -> Iterator[Composer]:
    """Open a project whose config sets parameters of submitit."""
    with sweep_in_a_file(folder, f"executor: submitit, submitit: {{{parameters}}}") as composing:
        yield composing


@contextmanager
def sweep_in_a_file(folder: Path, options: str) -> Iterator[Composer]:
    """Open a project whose config sets options of sweeps."""
    (folder / "config.yaml").write_text(
        "defaults: [hydraloop, data: digits, model: small_cnn, optimizer: adamw, precision: fp32, _self_]\n"
        f"sweep: {{{options}}}\n"
    )
    with opened(folder, "config") as composing:
        yield composing

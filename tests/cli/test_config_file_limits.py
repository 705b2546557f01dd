"""What only the command line may set: environment variables outside a list, and files outside the run directory."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from hydraloop.cli import command
from hydraloop.cli.arguments import typed_keys
from hydraloop.cli.config_file_limits import ENVIRONMENT, check_limits
from hydraloop.cli.hydra_targets import check_hydra
from hydraloop.errors import UserError
from tests.config.composed import composer

HARMFUL = [
    *("PATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "CXX", "CC", "HOME"),
    *("GIT_CONFIG_COUNT", "GIT_EXTERNAL_DIFF", "NCCL_NET_PLUGIN", "NCCL_DEBUG_FILE", "NCCL_CONF_FILE"),
    *("TORCH_LOGS", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    *("HF_ENDPOINT", "HF_HOME", "MLFLOW_S3_ENDPOINT_URL", "MLFLOW_TRACKING_URI", "WANDB_BASE_URL", "https_proxy"),
    *("cuda_visible_devices", "OMP_NUM_THREADS ", "CUDA_INJECTION64_PATH", "BROWSER", "TMPDIR"),
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
]  # fmt: skip


def config(**sections: Any) -> DictConfig:
    cfg = OmegaConf.create({"hydra": OmegaConf.structured(HydraConf), "hooks": {}, "default_hooks": {}})
    cfg.evil = {"n0": "fine", "n1": "../../evil", 0: "fine", 1: "../../evil", "env": {"PATH": "/evil"}}
    for section, value in sections.items():
        OmegaConf.update(cfg, section.replace("__", "."), value, force_add=True)
    return cfg


def refused(cfg: DictConfig, typed: set[str] | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        check_limits(cfg, typed or set())
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("name", HARMFUL)
def test_a_config_does_not_set_a_variable_that_could_run_code(name: str) -> None:
    assert refused(config(hydra__job__env_set={name: "x"})).key == f"hydra.job.env_set.{name}"


def test_variables_that_training_needs_may_be_set() -> None:
    check_limits(config(hydra__job__env_set=dict.fromkeys(ENVIRONMENT, "1")), set())


def test_a_typed_variable_may_be_set_and_brings_no_other_along() -> None:
    cfg = config(hydra__job__env_set={"PATH": "x", "CXX": "y"})
    typed = typed_keys(["++hydra.job.env_set={CXX: y}"])
    assert refused(cfg, typed).key == "hydra.job.env_set.PATH"
    check_limits(cfg, [*typed, "hydra.job.env_set.PATH"])


def test_an_interpolation_hides_no_variable() -> None:
    assert refused(config(hydra__job__env_set="${evil.env}")).key == "hydra.job.env_set"
    assert refused(config(hydra__job__env_set="${evil.${hydra.job.num}}")).key == "hydra.job.env_set"


def test_a_copied_variable_is_as_the_shell_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_FOLDER", "/mine")
    job = {"env_copy": ["SOME_FOLDER"], "env_set": {"SOME_FOLDER": "/mine"}}
    check_limits(config(hydra__job=job), set())
    job["env_set"] = {"SOME_FOLDER": "/evil"}
    assert refused(config(hydra__job=job)).key == "hydra.job.env_set.SOME_FOLDER"


@pytest.mark.parametrize("folder", ["..", "../conf", "/etc/x", "conf", ".", ".hydra/../../conf", ".github"])
def test_the_records_of_a_config_overwrite_no_other_config(folder: str) -> None:
    cfg = config(hydra__output_subdir=folder)
    assert refused(cfg).key == "hydra.output_subdir"
    check_limits(cfg, {"hydra.output_subdir"})


@pytest.mark.parametrize("folder", [None, ".hydra", ".hydra/second", ".hydra_2"])
def test_records_stay_in_folders_of_their_own(folder: str | None) -> None:
    check_limits(config(hydra__output_subdir=folder), set())


@pytest.mark.parametrize("typed", [set(), {"hydra.sweep.subdir"}])
@pytest.mark.parametrize("folder", ["../../pk2", "..", "/runs/pk2", "a/../../pk2", "${hydra.job.num}/../../x", "C:\\x"])
def test_a_jobs_folder_is_in_its_sweep(folder: str, typed: set[str]) -> None:
    assert refused(config(hydra__sweep={"dir": "multirun/x", "subdir": folder}), typed).key == "hydra.sweep.subdir"


@pytest.mark.parametrize("folder", ["${hydra.job.num}", "seed-${seed}/a", ".", "a/../b", "..a/b", "/sweeps/x/1", 7])
def test_a_jobs_folder_may_have_any_name(folder: str) -> None:
    check_limits(config(hydra__sweep={"dir": "/sweeps/x", "subdir": folder}), set())


LOG_FILES = {
    "evil.py": False,
    "run.log": False,
    "/tmp/run.log": False,
    "cfg://evil.log": False,
    "${hydra.run.dir}/run.log": False,
    "${hydra.runtime.output_dir}/run.py": False,
    "${hydra.runtime.output_dir}/run.log/../run.py": False,
    "${hydra.runtime.output_dir}/../run.log": False,
    "${hydra.runtime.output_dir}/a/../../run.log": False,
    "${hydra.runtime.output_dir}/${evil.n1}.log": False,
    "${hydra.runtime.output_dir}/${evil.${hydra.job.num}}.log": False,
    "${hydra.runtime.output_dir}/${oc.select:evil.${hydra.job.num},fine}.log": False,
    "${hydra.runtime.output_dir}/${hydra.job.id}.log": False,
    "${evil.${hydra.runtime.output_dir}}/run.log": False,
    "\\${hydra.runtime.output_dir}/run.log": False,
    "${hydra.runtime.output_dir}/run.log": True,
    "${hydra.runtime.output_dir}/${evil.n0}.log": False,
    "${hydra.runtime.output_dir}/${evil.${hydra.run.dir}}": False,
    "${hydra:runtime.output_dir}/logs/${hydra.job.name}_${hydra.job.num}.log": True,
}


@pytest.mark.parametrize("file", LOG_FILES)
def test_log_files_stay_in_the_run_directory(file: str) -> None:
    key = "hydra.job_logging.handlers.x.filename"
    handler = {"class": "logging.FileHandler", "filename": file}
    cfg = config(hydra__job_logging={"handlers": {"x": handler}})
    if LOG_FILES[file]:
        check_hydra(cfg)
    else:
        with pytest.raises(UserError) as caught:
            check_hydra(cfg)
        assert caught.value.key == key
    check_hydra(cfg, {key})


def test_a_handlers_file_is_not_changed_after_it_is_made() -> None:
    handler = {"class": "logging.FileHandler", "filename": "${hydra.runtime.output_dir}/a.log", "delay": True}
    handler["."] = {"baseFilename": "evil.py"}
    with pytest.raises(UserError) as caught:
        check_hydra(config(hydra__job_logging={"handlers": {"x": handler}}))
    assert caught.value.key == "hydra.job_logging.handlers.x.."


@pytest.mark.parametrize("name", ["../../evil", "${evil.${hydra.run.dir}}", "/tmp/evil", "a/../../../evil"])
def test_the_name_of_the_job_leads_no_log_file_out_of_the_run_directory(name: str) -> None:
    cfg = config(hydra__job__name=name)
    cfg.hydra.job_logging = {"handlers": {"x": {"filename": "${hydra.runtime.output_dir}/${hydra.job.name}.log"}}}
    with pytest.raises(UserError) as caught:
        check_hydra(cfg)
    assert caught.value.key == "hydra.job_logging.handlers.x.filename"


def test_composing_tells_what_is_typed_from_what_a_sweep_in_a_config_sets() -> None:
    line = "++hydra.job.env_set.CXX=c++"
    with composer() as opened:
        assert command.compose_job([line], opened).hydra.job.env_set == {"CXX": "c++"}
        with pytest.raises(UserError, match="environment variable"):
            command.compose_job([line], opened, typed=[])
        command.compose_sweep([line], opened, ["hydra.job.env_set.CXX"])


def test_keys_that_overrides_set() -> None:
    lines = ["a.b=1", "+c={d: 1, e: {f: 2}}", "~g.h", "i=1,2", "++j=[{k: 1}]"]
    assert typed_keys(lines) == ("a.b", "c.d", "c.e.f", "i", "j")

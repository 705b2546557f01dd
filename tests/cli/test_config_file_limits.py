"""What only the command line may set of Hydra: everything but a short list, and files outside the run directory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hydraloop.cli import command
from hydraloop.cli.arguments import typed_keys
from hydraloop.cli.compose import Composer, opened
from hydraloop.cli.config_file_limits import ENVIRONMENT, check_limits, written
from hydraloop.errors import UserError
from hydraloop.safety.allowlist import ALLOWLIST
from tests.config.composed import REPOSITORY, composer

HARMFUL = [
    *("PATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "CXX", "CC", "HOME"),
    *("GIT_CONFIG_COUNT", "GIT_EXTERNAL_DIFF", "NCCL_NET_PLUGIN", "NCCL_DEBUG_FILE", "NCCL_CONF_FILE"),
    *("TORCH_LOGS", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    *("HF_ENDPOINT", "HF_HOME", "MLFLOW_S3_ENDPOINT_URL", "MLFLOW_TRACKING_URI", "WANDB_BASE_URL", "https_proxy"),
    *("cuda_visible_devices", "OMP_NUM_THREADS ", "CUDA_INJECTION64_PATH", "BROWSER", "TMPDIR"),
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
]  # fmt: skip


@pytest.fixture(scope="module")
def default() -> dict[str, Any]:
    """Hydra's section as written, without a user's option. The defaults with which it is compared are cached."""
    with composer() as opened:
        hydra: dict[str, Any] = written(command.compose_job([], opened), "hydra")
    return hydra


def with_file(default: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The section with options of a config file."""
    cfg = OmegaConf.create(copy.deepcopy(default))
    for key, value in options.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    hydra: dict[str, Any] = written(OmegaConf.create({"hydra": cfg}), "hydra")
    return hydra


def refused(hydra: dict[str, Any], *typed: str) -> UserError:
    with pytest.raises(UserError) as caught:
        check_limits(hydra, typed)
    assert caught.value.remedy
    return caught.value


LATER = "${evil.${hydra.run.dir}}"
"""Resolves to another value in the run than here: by then the directory is written in another way."""
REFUSED: dict[str, tuple[str, Any]] = {
    # the key that is named: what a file sets
    "hydra.verbose": ("verbose", True),
    "hydra.job.chdir": ("job.chdir", True),
    "hydra.job.env_copy": ("job.env_copy", ["PATH"]),
    "hydra.job.config.override_dirname.item_sep": ("job", {"config": {"override_dirname": {"item_sep": ";"}}}),
    "hydra.help.app_name": ("help.app_name", "mine"),
    "hydra.callbacks": ("callbacks", "${evil}"),
    "hydra.callbacks.x._target_": ("callbacks.x", {"_target_": "hydra.experimental.callbacks.LogJobReturnCallback"}),
    "hydra.launcher": ("launcher", "${evil}"),
    "hydra.launcher.max_workers": ("launcher.max_workers", 2),
    "hydra.sweeper._target_": ("sweeper", {"_target_": "my_project.sweeper.Mine"}),
    "hydra.sweeper.max_batch_size": ("sweeper.max_batch_size", 2),
    "hydra.sweeper.params": ("sweeper.params", "${evil}"),
    "hydra.sweeper.params.seed": ("sweeper.params", {"seed": f"1,{LATER}"}),
    "hydra.job_logging": ("job_logging", LATER),
    "hydra.job_logging.root.level": ("job_logging.root.level", "DEBUG"),
    "hydra.job_logging.formatters.full.format": ("job_logging.formatters.full.format", "%(message)s"),
    "hydra.job_logging.handlers.x.class": ("job_logging.handlers.x", {"class": "logging.FileHandler"}),
    "hydra.job_logging.handlers.file..": ("job_logging.handlers.file", {".": "evil.py"}),
    "hydra.hydra_logging.root.handlers": ("hydra_logging.root.handlers", []),
    "hydra.run": ("run", "${evil}"),
    "hydra.job.env_set": ("job.env_set", "${evil.env}"),
    "hydra.output_subdir": ("output_subdir", "conf"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_file_may_not_set_what_is_not_on_the_list(key: str, default: dict[str, Any]) -> None:
    hydra = with_file(default, dict([REFUSED[key]]))
    assert refused(hydra).key == key
    check_limits(hydra, [key, "hydra.job_logging.handlers.file...baseFilename"])


def test_the_message_has_a_command_to_paste(default: dict[str, Any]) -> None:
    error = refused(with_file(default, {"job.chdir": True}))
    assert str(error) == (
        "hydra.job.chdir: a config file may not set this option of Hydra\n"
        "  Type it on the command line: ++hydra.job.chdir=True\n"
        "  To let config files set all options of Hydra: hydraloop.main(hydra_sections=True) in train.py"
    )


def test_the_program_may_let_files_set_everything(default: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ALLOWLIST, "hydra_sections", True)
    for option in REFUSED.values():
        check_limits(with_file(default, dict([option])), [])


@pytest.mark.parametrize("name", HARMFUL)
def test_a_config_does_not_set_a_variable_that_could_run_code(name: str, default: dict[str, Any]) -> None:
    assert refused(with_file(default, {"job.env_set": {name: "x"}})).key == f"hydra.job.env_set.{name}"


def test_a_file_may_set_what_is_on_the_list(default: dict[str, Any]) -> None:
    options = {
        "mode": "MULTIRUN",
        "run.dir": "${evil}",
        "sweep": {"dir": "/sweeps/x", "subdir": "seed-${seed}"},
        "job.name": "${experiment_name}",
        "job.env_set": dict.fromkeys(ENVIRONMENT, "1"),
        "searchpath": ["conf"],
        "sweeper.params": {"seed": "1,2"},
    }
    check_limits(with_file(default, options), [])


def test_a_typed_variable_may_be_set_and_brings_no_other_along(default: dict[str, Any]) -> None:
    hydra = with_file(default, {"job.env_set": {"PATH": "x", "CXX": "y"}})
    typed = typed_keys(["++hydra.job.env_set={CXX: y}"])
    assert refused(hydra, *typed).key == "hydra.job.env_set.PATH"
    check_limits(hydra, [*typed, "hydra.job.env_set.PATH"])


@pytest.mark.parametrize("folder", ["..", "../conf", "/etc/x", "conf", ".", ".hydra/../../conf", ".github"])
def test_the_records_of_a_config_overwrite_no_other_config(folder: str, default: dict[str, Any]) -> None:
    hydra = with_file(default, {"output_subdir": folder})
    assert refused(hydra).key == "hydra.output_subdir"
    check_limits(hydra, ["hydra.output_subdir"])


@pytest.mark.parametrize("folder", [None, ".hydra", ".hydra/second", ".hydra_2"])
def test_records_stay_in_folders_of_their_own(folder: str | None, default: dict[str, Any]) -> None:
    check_limits(with_file(default, {"output_subdir": folder}), [])


@pytest.mark.parametrize("typed", [[], ["hydra.sweep.subdir"]])
@pytest.mark.parametrize("folder", ["../../pk2", "..", "/runs/pk2", "a/../../pk2", "${hydra.job.num}/../../x", "C:\\x"])
def test_a_jobs_folder_is_in_its_sweep(folder: str, typed: list[str], default: dict[str, Any]) -> None:
    hydra = with_file(default, {"sweep": {"dir": "multirun/x", "subdir": folder}})
    assert refused(hydra, *typed).key == "hydra.sweep.subdir"


@pytest.mark.parametrize("folder", ["${hydra.job.num}", "seed-${seed}/a", ".", "a/../b", "..a/b", "/sweeps/x/1", 7])
def test_a_jobs_folder_may_have_any_name(folder: str, default: dict[str, Any]) -> None:
    check_limits(with_file(default, {"sweep": {"dir": "/sweeps/x", "subdir": folder}}), [])


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
def test_log_files_stay_in_the_run_directory(file: str, default: dict[str, Any]) -> None:
    hydra = with_file(default, {"job_logging.handlers.file.filename": file})
    key = "hydra.job_logging.handlers.file.filename"
    if LOG_FILES[file]:
        check_limits(hydra, [])
    else:
        assert refused(hydra).key == key
    check_limits(hydra, [key])


@pytest.mark.parametrize("name", ["../../evil", LATER, "/tmp/evil", "a/../../../evil"])
def test_the_name_of_the_job_leads_no_log_file_out_of_the_run_directory(name: str, default: dict[str, Any]) -> None:
    key, path = "job_logging.handlers.file.filename", "${hydra.runtime.output_dir}/${hydra.job.name}.log"
    assert refused(with_file(default, {"job.name": name, key: path})).key == f"hydra.{key}"


@pytest.fixture
def files(tmp_path: Path) -> Iterator[tuple[Path, Composer]]:
    """A folder of config files, in addition to those of the repository."""
    (tmp_path / "experiment").mkdir()
    with opened(REPOSITORY / "conf", "config", tmp_path) as composer:
        yield tmp_path / "experiment" / "mine.yaml", composer


FILES = {
    "hydra: {verbose: true}": "hydra.verbose",
    "hydra: {overrides: {task: [seed=3]}}": "hydra.overrides",
    "hydra: {overrides: {hydra: ['++hydra.job.env_set.PATH=evil']}}": "hydra.overrides",
    "defaults: [override /hydra/job_logging: own]": "hydra.job_logging.version",
}


@pytest.mark.parametrize("text", FILES)
@pytest.mark.parametrize("is_sweep", [False, True])
def test_a_file_that_hydra_composes(text: str, is_sweep: bool, files: tuple[Path, Composer]) -> None:
    file, composer = files
    file.write_text(f"# @package _global_\n{text}\n")
    (file.parents[1] / "hydra" / "job_logging").mkdir(parents=True)
    (file.parents[1] / "hydra" / "job_logging" / "own.yaml").write_text("{version: 1, root: {handlers: []}}")
    compose, lines = (command.compose_sweep, ["seed=1,2"]) if is_sweep else (command.compose_job, [])
    with pytest.raises(UserError) as caught:
        compose(["experiment=mine", *lines], composer, ["seed"])
    assert caught.value.key == FILES[text]


@pytest.mark.parametrize("name", ["own", "hydraloop"])
@pytest.mark.filterwarnings(r"ignore:\s*'hydra/job_logging/hydraloop' is validated")
def test_a_typed_selection_allows_nothing_in_its_file(name: str, files: tuple[Path, Composer]) -> None:
    """A project's file may have the name of an option of Hydra, which it replaces."""
    file, composer = files
    (file.parents[1] / "hydra" / "job_logging").mkdir(parents=True)
    (file.parents[1] / "hydra" / "job_logging" / f"{name}.yaml").write_text("mine: 1")
    with pytest.raises(UserError, match="a config file may not set this") as caught:
        command.compose_job([f"hydra/job_logging={name}"], composer)
    assert caught.value.key == "hydra.job_logging.mine"


@pytest.mark.parametrize("option", ["default", "stdout", "disabled", "none", "hydraloop"])
def test_a_file_may_select_an_option_of_hydra(option: str, files: tuple[Path, Composer]) -> None:
    file, composer = files
    file.write_text(f"# @package _global_\ndefaults: [override /hydra/job_logging: {option}]\n")
    assert command.compose_job(["experiment=mine"], composer).seed is not None


def test_a_variable_that_hydra_copies(files: tuple[Path, Composer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_FOLDER", "/mine")
    file, composer = files
    file.write_text("# @package _global_\nhydra: {job: {env_set: {SOME_FOLDER: /evil}}}\n")
    cfg = command.compose_job(["experiment=mine", "hydra.job.env_copy=[SOME_FOLDER]"], composer)
    assert cfg.hydra.job.env_set.SOME_FOLDER == "/mine"


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

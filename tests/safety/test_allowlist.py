from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from torch import nn

from hydraloop.errors import UserError
from hydraloop.safety.allowlist import ALLOWLIST, Allowlist
from hydraloop.safety.instantiate import instantiate

PYTHONS = ("os.", "posix.", "subprocess.", "builtins.", "importlib.", "runpy.", "pickle.", "pathlib.", "shutil.")
ALLOWED = [
    "hydraloop.hooks.EMAHook",
    "hydraloop.data.Digits",
    "hydraloop.tasks.Accuracy",
    "hydraloop.models.SmallCNN",
    "torch.nn.Linear",
    "torch.nn.modules.linear.Linear",
    "torch.nn.functional.cross_entropy",
    "torch.nn.functional.gelu",
    "torch.nn.Embedding.from_pretrained",
    "torch.nn.utils.parametrizations.weight_norm",
    "torch.optim.AdamW",
    "torch.optim.lr_scheduler.CosineAnnealingLR",
    "torch.utils.data.TensorDataset",
    "torch.utils.data.random_split",
    "torch.utils.data.sampler.RandomSampler",
    "torch.utils.data.default_collate",
    *(
        f"torch.profiler.{name}"
        for name in (
            "profile",
            "schedule",
            "ProfilerActivity",
            "ProfilerAction",
            "record_function",
        )
    ),
    "torch.profiler.profiler.profile",
    *(
        f"torch.nn.functional.{name}"
        for name in (
            "conv2d",
            "linear",
            "pixel_shuffle",
            "pairwise_distance",
            "cosine_similarity",
            "celu_",
            "max_pool2d",
            "adaptive_max_pool1d",
            "softplus",
        )
    ),
    "torch.nn.init.xavier_uniform_",
    "torchmetrics.classification.MulticlassAccuracy",
    "torchmetrics.functional.accuracy",
    "hydraloop.models.MLP",
    "hydraloop.hooks.ema.EMAHook",
    "own_project.parts.EMAHook",
    "own_project.parts.cached",
    "own_project.parts.Net.Inner",
    "own_project.parts.Net",
    "own_project.parts.make_net",
    "own_project.parts.Net.small",
    "own_project.parts.torch.nn.Linear",
    "loose_file.Net",
]
REFUSED = [
    "torch.hub.load",
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "torch.jit.script",
    "torch.package.PackageImporter",
    "torch.utils.cpp_extension.load",
    "torch.utils.cpp_extension.load_inline",
    "torch.utils.model_zoo.load_url",
    "torch.serialization.load",
    "torch.classes.load_library",
    "torch.ops.load_library",
    "torch.distributed.launch",
    "torch.compile",
    "torch.utils.data._utils.worker._worker_loop",
    "torch.utils.data.datapipes.utils.decoder.basichandlers",
    "torch.utils.data.datapipes.iter.FileOpener",
    "torch.nn._reduction.get_enum",
    "torch.nn.functional.torch.load",
    "torch.nn.functional.torch.hub.load",
    "torch.nn.modules.module.torch.load",
    "torch.optim.optimizer.torch.load",
    "torch.nn.functional.importlib.import_module",
    "torch.nn.functional.warnings.warn",
    "torch.nn.functional.importlib",
    "torch.nn.functional.torch",
    "torch.nn.functional.Tensor",
    "torch.nn.functional.boolean_dispatch",
    "torch.nn.functional.handle_torch_function",
    "torch.nn.functional.has_torch_function",
    "torch.conv2d",
    "torch.profiler.ExecutionTraceObserver",
    "torch.profiler.profiler.ExecutionTraceObserver",
    "torch.profiler.profiler.ExecutionTraceObserver.build_execution_trace_obs_from_env",
    "torch.profiler.supported_activities",
    "torch.profiler.itt.mark",
    "torch.utils.data.graph.traverse_dps",
    "torch.utils.data.functional_datapipe",
    "torch.utils.data.backward_compatibility.worker_init_fn",
    "torchmetrics.detection.helpers.CocoBackend",
    "torchmetrics.functional.multimodal.clip_score.clip_score",
    "torchmetrics.multimodal.clip_score.CLIPScore",
    "torchmetrics.functional.text.bert.bert_score",
    "torchmetrics.functional.image.arniqa.arniqa",
    "hydraloop.data.in_memory.find_data_file",
    "hydraloop.data.in_memory.read_table",
    "hydraloop.hooks.checkpoint_folder.CheckpointFolder",
    "hydraloop.hooks.checkpoint_folder.CheckpointFolder.open",
    "hydraloop.hooks.checkpoint_copies.publish",
    "own_project.parts.publish",
    "own_project.parts.ExecutionTraceObserver",
    "hydraloop.tasks.metrics.torch.load",
    "hydraloop.hooks.checkpoint.os.system",
    "hydraloop.data.in_memory.Path",
    "hydraloop.launch.build.build",
    "hydraloop.commands.command_line.main",
    "hydraloop.safety.allowlist.ALLOWLIST.trust",
    "hydraloop.files.run_directory.new_run_dir",
    "hydraloop.files.environment._git",
    "hydraloop.engine.engine.Engine",
    "own_project.parts.torch.load",
    "own_project.parts.os.system",
    "own_project.parts.os.path.exists",
    "own_project.parts.run",
    "own_project.parts.loaded.load",
    "own_project.parts.Net.__init__.__globals__",
    "own_project.parts.Net.__init__.__globals__.get",
    "own_project.parts.Net.__class__",
    "own_project.parts.Net.__subclasses__",
    "own_project.parts.log.info",
    "os.system",
    "os.path.exists",
    "posix.system",
    "subprocess.Popen",
    "builtins.eval",
    "builtins.exec",
    "builtins.__import__",
    "builtins.open",
    "importlib.import_module",
    "runpy.run_path",
    "pickle.loads",
    "pathlib.Path.unlink",
    "shutil.rmtree",
    "hydra.utils.instantiate",
    "hydra.utils.get_method",
    "omegaconf.OmegaConf.load",
    "numpy.load",
    "pytest.main",
]

_NOT_CALLABLE = (".importlib", ".functional.torch", "__globals__", "__subclasses__", "arniqa")
_MADE = (
    *("own_project", "loose_file", "outside", "linked", "environment", "spoken_for"),
    *("vendored", "reexporting"),
)
PARTS = """
import logging, os, subprocess
import torch
import torch.hub as loaded
from subprocess import Popen as run
from hydraloop.hooks import EMAHook
from hydraloop.hooks.checkpoint_copies import publish
from torch.profiler import ExecutionTraceObserver
import functools

log = logging.getLogger(__name__)

class Net(torch.nn.Module):
    def __init__(self, width=1, other=None):
        super().__init__()
        self.layer = torch.nn.Linear(1, width)

    @classmethod
    def small(cls):
        return cls()

    @staticmethod
    def static():
        return Net()

    def method(self, path):
        return path

    class Inner:
        pass

def make_net():
    return Net()

@functools.cache
def cached():
    return Net()

made = Net()
bound = made.method

number = 5
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project's folder with a package, a loose file, and things that do not belong to it; on `sys.path`."""
    folder = tmp_path / "project"
    (folder / "own_project").mkdir(parents=True)
    (folder / "own_project" / "__init__.py").touch()
    (folder / "own_project" / "parts.py").write_text(PARTS)
    (folder / "loose_file.py").write_text("from own_project.parts import Net\n")
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name.split(".")[0] in _MADE:
            del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def allowlist(project: Path) -> Allowlist:
    found = Allowlist()
    found.trust_folder(project)
    return found


def side_effect(marker: Path) -> str:
    return f"open({str(marker)!r}, 'w').close()\nclass Thing:\n    pass\n"


@pytest.mark.parametrize("target", ALLOWED)
def test_allowed(target: str, allowlist: Allowlist) -> None:
    assert callable(allowlist.locate(target, "hooks.x"))


@pytest.mark.parametrize("target", REFUSED)
def test_refused(target: str, allowlist: Allowlist) -> None:
    with pytest.raises(UserError) as caught:
        allowlist.locate(target, "hooks.x")
    assert caught.value.key == "hooks.x._target_"
    assert target in caught.value.problem
    assert "a config may not instantiate" in caught.value.problem
    remedy = str(caught.value.remedy)
    of_python = remedy.startswith("Name a function of your own")  # whose functions may do anything
    assert of_python or "hydraloop.compose(…, trusted=[" in remedy
    assert of_python or not target.startswith(PYTHONS)


@pytest.mark.parametrize(
    "target",
    [
        *(name for name in REFUSED if not name.endswith(_NOT_CALLABLE)),
        "reexporting.Net",
        "reexporting.Other",
        "reexporting.inner.Net",
        "reexporting.dumps",
        "own_project.vendored.Net",
        "own_project.vendored.Other",
        "torch.utils.tensorboard.SummaryWriter",
    ],
)
def test_following_the_remedies_works(
    target: str, allowlist: Allowlist, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a class that a package or the project re-exports from another package."""
    folder = project.parent / "elsewhere"
    files = {
        "vendored.py": "class Net:\n    pass\n",
        "reexporting/__init__.py": "from json import dumps\nfrom vendored import Net\nfrom .inner import Other\n",
        "reexporting/inner.py": "from vendored import Net\nclass Other:\n    pass\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (project / "own_project" / "vendored.py").write_text("from vendored import Net\nfrom reexporting import Other\n")
    monkeypatch.syspath_prepend(str(folder))
    trusted: list[str] | None = []
    for _ in range(3):
        allowlist.trust(trusted or ())
        if (trusted := _trusted_by_the_remedy(target, allowlist)) is None:
            return
    raise AssertionError(f"the remedy for {target} does not help: {trusted}")


def _trusted_by_the_remedy(target: str, allowlist: Allowlist) -> list[str] | None:
    """What the error says to trust; None: there is none, or it is not about trust (the target is a module)."""
    try:
        allowlist.locate(target, "hooks.x")
    except UserError as error:
        found = re.search(r"hydraloop\.compose\(…, trusted=(\[.*?\])\)", str(error.remedy))
        return json.loads(found[1]) if found else None
    return None


@pytest.mark.parametrize(
    "target",
    [
        "torch.nn.Linear.forward",
        "torch.nn.Module.load_state_dict",
        "torch.nn.Module.share_memory",
        "torch.optim.Optimizer.profile_hook_step",
        "torchmetrics.Metric.plot",
        "torchmetrics.detection.mean_ap.MeanAveragePrecision.tm_to_coco",
        "own_project.parts.Net.method",
        "own_project.parts.Net.static",
        "own_project.parts.Net.__init__",
        "own_project.parts.made",
        "own_project.parts.made.method",
        "own_project.parts.made.small",
        "own_project.parts.bound",
    ],
)
def test_methods_and_objects_are_refused(target: str, allowlist: Allowlist) -> None:
    with pytest.raises(UserError, match="not a class, a classmethod or a function of a module") as caught:
        allowlist.locate(target, "hooks.x")
    assert caught.value.key == "hooks.x._target_"


@pytest.mark.parametrize("package", ["hooks", "tasks", "data", "models", "optim"])
def test_all_that_a_component_package_exports_is_allowed(package: str, allowlist: Allowlist) -> None:
    names = importlib.import_module(f"hydraloop.{package}").__all__
    for name in names:
        found = allowlist.locate(f"hydraloop.{package}.{name}", "hooks.x")
        assert allowlist.locate(f"{found.__module__}.{name}", "hooks.x") is found


@pytest.mark.parametrize("name", ["max_pool2d", "conv2d"])
def test_a_function_of_torch_without_a_place_of_its_own_is_built(name: str) -> None:
    node = OmegaConf.create({"_target_": f"torch.nn.functional.{name}", "_partial_": True})
    assert instantiate(node, "task.loss").func is getattr(nn.functional, name)


def test_the_rest_of_hydraloop_is_refused_where_it_lies_in_the_projects_folder(allowlist: Allowlist) -> None:
    """As in hydraloop's own repository, whose train.py is next to the package."""
    allowlist.trust_folder(Path(__file__).resolve().parents[2])
    for target in (
        "hydraloop.safety.allowlist.ALLOWLIST.trust",
        "hydraloop.files.environment.git_diff",
        "hydraloop.build",
    ):
        with pytest.raises(UserError, match="a config may not instantiate"):
            allowlist.locate(target, "hooks.x")
    assert allowlist.locate("my_project.model.SpiralNet", "hooks.x").__name__ == "SpiralNet"


def test_nothing_outside_is_imported_to_find_out(allowlist: Allowlist, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "outside.py").write_text(side_effect(tmp_path / "imported"))
    sys.path.append(str(elsewhere))
    try:
        with pytest.raises(UserError, match="a config may not instantiate"):
            allowlist.locate("outside.Thing", "hooks.x")
    finally:
        sys.path.remove(str(elsewhere))
    assert not (tmp_path / "imported").exists()
    assert "outside" not in sys.modules


@pytest.mark.parametrize("place", ["linked.py", "own_project/linked.py", "linked", "own_project/linked"])
def test_a_link_out_of_the_project_is_not_followed(
    place: str, allowlist: Allowlist, project: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "outside.py").write_text(side_effect(tmp_path / "imported"))
    is_file = place.endswith(".py")
    (project / place).symlink_to(elsewhere / "outside.py" if is_file else elsewhere)
    target = place.removesuffix(".py").replace("/", ".") + (".Thing" if is_file else ".outside.Thing")
    with pytest.raises(UserError, match="a config may not instantiate"):
        allowlist.locate(target, "hooks.x")
    assert not (tmp_path / "imported").exists()


def test_a_link_within_the_project_is_followed(allowlist: Allowlist, project: Path) -> None:
    (project / "linked.py").symlink_to(project / "own_project" / "parts.py")
    assert allowlist.locate("linked.make_net", "task.model")().layer.out_features == 1


@pytest.mark.parametrize("folder", ["environment", "own_project/environment"])
def test_an_environment_in_the_project_is_not_the_projects(
    folder: str, allowlist: Allowlist, project: Path, tmp_path: Path
) -> None:
    (project / folder).mkdir()
    (project / folder / "pyvenv.cfg").touch()
    (project / folder / "thing.py").write_text(side_effect(tmp_path / "imported"))
    with pytest.raises(UserError, match="a config may not instantiate"):
        allowlist.locate(f"{folder.replace('/', '.')}.thing.Thing", "hooks.x")
    assert not (tmp_path / "imported").exists()


def test_packages_installed_under_the_project_are_not_the_projects(
    allowlist: Allowlist, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = project / "lib" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "spoken_for.py").write_text(side_effect(tmp_path / "imported"))
    monkeypatch.syspath_prepend(str(installed))
    with pytest.raises(UserError, match=r'trusted=\["spoken_for"\]'):
        allowlist.locate("spoken_for.Thing", "hooks.x")
    assert not (tmp_path / "imported").exists()
    allowlist.trust(["spoken_for"])
    assert allowlist.locate("spoken_for.Thing", "hooks.x").__name__ == "Thing"


def test_a_trusted_package_brings_nothing_else_along(allowlist: Allowlist) -> None:
    allowlist.trust(["numpy", "torch.hub.load"])
    assert allowlist.locate("numpy.zeros", "hooks.x")
    assert allowlist.locate("torch.hub.load", "hooks.x")
    for target in ("numpy.os.system", "torch.hub.os.remove", "torch.hub.download_url_to_file", "numpyx.zeros"):
        with pytest.raises(UserError):
            allowlist.locate(target, "hooks.x")


def test_one_list_knows_nothing_of_another(allowlist: Allowlist) -> None:
    with pytest.raises(UserError):
        Allowlist().locate("own_project.parts.Net", "task.model")


@pytest.mark.parametrize(
    ("target", "problem", "remedy"),
    [
        ("torch.nn.Linaer", "torch.nn has no 'Linaer' with the installed packages", "Linear"),
        ("own_project.parts.Nett", "own_project.parts has no 'Nett'", "Did you mean Net"),
        ("own_project.prts.Net", "own_project has no 'prts'", "Did you mean parts?"),
        ("own_projct.parts.Net", "there is no module 'own_projct'", "Check the spelling, or install the package."),
        ("Net", "'Net' is not the path of a class", "package.module.Class"),
        ("", "'' is not the path of a class", "package.module.Class"),
        ("own_project.parts.Net.", "is not the path of a class", "package.module.Class"),
        ("own_project..Net", "is not the path of a class", "package.module.Class"),
        ("own project.Net", "is not the path of a class", "package.module.Class"),
        ("own_project.parts", "own_project.parts is not a class", "Name one of these"),
        ("torch.nn", "torch.nn is not a class", "Name one of these"),
    ],
)
def test_what_does_not_exist_is_said_with_close_names(
    target: str, problem: str, remedy: str, allowlist: Allowlist
) -> None:
    with pytest.raises(UserError) as caught:
        allowlist.locate(target, "task.model")
    assert caught.value.key == "task.model._target_"
    assert problem in caught.value.problem
    assert remedy in str(caught.value.remedy)


def test_a_bug_in_the_projects_own_module_is_not_swallowed(allowlist: Allowlist, project: Path) -> None:
    (project / "own_project" / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        allowlist.locate("own_project.broken.Net", "task.model")
    (project / "own_project" / "importing.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        allowlist.locate("own_project.importing.Net", "task.model")


def test_a_trusted_package_that_is_not_installed_is_named(allowlist: Allowlist) -> None:
    allowlist.trust("timn")
    with pytest.raises(UserError, match="there is no module 'timn'") as caught:
        allowlist.locate("timn.create_model", "task.model")
    assert caught.value.remedy == "Check the spelling, or install the package."


@pytest.mark.parametrize(
    ("node", "key"),
    [
        ({"_target_": "own_project.parts.Net", "other": {"_target_": "os.system", "command": "x"}}, "task.model.other"),
        ({"_target_": "own_project.parts.Net", "other": [1, {"_target_": "os.getcwd"}]}, "task.model.other[1]"),
        (
            {"_target_": "own_project.parts.Net", "other": {"a": {"b": {"_target_": "os.abort"}}}},
            "task.model.other.a.b",
        ),
        ({"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "os.abort"}]}, "task.model._args_[0]"),
        (
            {"_target_": "own_project.parts.Net", "other": {"_target_": "os.${name}", "name": "abort"}},
            "task.model.other",
        ),
        (
            {"_target_": "own_project.parts.Net", "_recursive_": False, "other": {"_target_": "os.abort"}},
            "task.model.other",
        ),
        (
            {"_target_": "own_project.parts.Net", "_partial_": True, "other": {"_target_": "os.abort"}},
            "task.model.other",
        ),
    ],
)
def test_nested_targets_are_refused_before_anything_is_called(
    node: dict[str, object], key: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ALLOWLIST, "_folders", {project})
    parts = importlib.import_module("own_project.parts")
    made: list[object] = []
    monkeypatch.setattr(parts.Net, "__init__", lambda self, width=1, other=None: made.append(self))
    with pytest.raises(UserError, match="a config may not instantiate") as caught:
        instantiate(OmegaConf.create({"task": {"model": node}, "name": "abort"}).task.model, "task.model")
    assert caught.value.key == f"{key}._target_"
    assert made == []


def test_allowed_nested_targets_are_built() -> None:
    node = OmegaConf.create(
        {
            "_target_": "torch.nn.Sequential",
            "_args_": [
                {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3},
                {"_target_": "torch.nn.ReLU"},
            ],
        }
    )
    built = instantiate(node, "task.model")
    assert [type(part) for part in built] == [nn.Linear, nn.ReLU]

"""Guards around every test: a test that leaves the process changed fails. Also how the files share the processes."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.slurm import Slurm

# torch is imported in the fixtures: the process that only starts the others, with -n, does not need it.

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TESTS = Path(__file__).parent
_SHARED = {
    "slurm": "from tests.slurm import",
    "mlflow": "from tests.tracking.mlflow.runs import",
    "ranks": "from tests.ranks import",
    "e2e": "from tests.e2e.projects import",
}
"""What takes seconds to start in a process (Slurm, MLflow, ranks, the server of scripts), by what its files import."""
_LONGEST = (*_SHARED, "tracking", "engine", "cli", "hooks", "optim")
"""Folders whose files take longest, in this order, and files that are in none."""
_NOT_OURS = (
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "KINETO_LOG_LEVEL",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
)
"""Set by pytest, by torch when it imports its compiler, by torch's profiler, and the last two by scikit-learn."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, so that all processes of scripts/test.sh end at about the same time."""
    items.sort(key=lambda item: _place(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run all files that share something in one process, so that it is started once."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    # Most of these share the server, so one process would do most of the work.
    slow = config.option.markexpr in ("slow", "nightly")

    class ByShared(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            shared = _shared(config.rootpath / file)
            return file if shared is None or (slow and shared == "e2e") else shared

    return ByShared(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Hide torch, Hydra and all tests from the garbage collector, which would go through them in every test."""
    gc.disable()
    try:
        _import_a_share(getattr(session.config, "workerinput", None))
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _import_a_share(worker: dict[str, Any] | None) -> None:
    """Import other files first in each process of -n, because the first to import a file compiles it for all."""
    if worker is None:
        return
    files = sorted(_TESTS.rglob("test_*.py"))
    for file in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection reports it
            importlib.import_module(".".join(file.relative_to(_TESTS.parent).with_suffix("").parts))


def _place(file: Path) -> int:
    first = _shared(file) or file.relative_to(_TESTS).parts[0]
    return _LONGEST.index(first) if first in _LONGEST else len(_LONGEST)


@functools.cache
def _shared(file: Path) -> str | None:
    text = file.read_text(encoding="utf-8")
    return next((name for name, line in _SHARED.items() if line in text), None)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Small tensors are fastest on one thread, and sums have the same bits on any machine."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """Restore Ctrl-C, which a shell ignores for tests in the background, and so for every process they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _no_record_in_the_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Record the projects of tests in a temporary folder."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True, scope="session")
def _repository_asked_once() -> Iterator[None]:
    """Ask git once for the state of this repository, which each engine records. Other folders ask git each time."""
    from hydraloop.files import environment

    ask = environment._git
    repeated = functools.cache(ask)

    def answer(folder: Path, *arguments: str) -> str | None:
        return (repeated if folder == _TESTS.parent else ask)(folder, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "_git", answer)
        yield


@pytest.fixture(scope="session")
def _slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    from tests.slurm import running

    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def slurm(_slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """A real Slurm with two nodes, whose commands the test and its processes find. No job is left of other tests."""
    with monkeypatch.context() as patch:
        for name, value in _slurm.environment.items():
            patch.setenv(name, value)
        yield _slurm
        _slurm.cancel_all()


@pytest.fixture(autouse=True)
def _environment_unchanged() -> Iterator[None]:
    before = _environment()
    yield
    after = _environment()
    for name in before.keys() | after.keys():
        if name not in before:
            del os.environ[name]
        else:
            os.environ[name] = before[name]
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    assert not changed, f"the test changed the environment: {changed}"


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _NOT_OURS}


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before and not thread.daemon]
    assert not left, f"the test left threads running: {left}"


@pytest.fixture(autouse=True)
def _signal_handlers_unchanged() -> Iterator[None]:
    before = [signal.getsignal(number) for number in _SIGNALS]
    yield
    after = [signal.getsignal(number) for number in _SIGNALS]
    for number, handler in zip(_SIGNALS, before, strict=True):
        signal.signal(number, handler)
    assert after == before, "the test left a signal handler installed"


@pytest.fixture(autouse=True)
def _working_directory_unchanged() -> Iterator[None]:
    before = Path.cwd()
    yield
    after = Path.cwd()
    os.chdir(before)
    assert after == before, "the test left the process in another directory"


@pytest.fixture(autouse=True)
def _hydra_cleared() -> Iterator[None]:
    yield
    module = sys.modules.get("hydra.core.global_hydra")
    if module is not None:
        left = module.GlobalHydra.instance().is_initialized()
        module.GlobalHydra.instance().clear()
        assert not left, "the test left Hydra initialised"


@pytest.fixture(autouse=True, scope="module")
def _allowlist_restored_after_a_file() -> Iterator[None]:
    """A fixture of a whole file may compose, too, before its first test."""
    with _same_allowlist():
        yield


@pytest.fixture(autouse=True)
def _allowlist_restored() -> Iterator[None]:
    with _same_allowlist():
        yield


@contextlib.contextmanager
def _same_allowlist() -> Iterator[None]:
    """`main` and `sync` trust folders and packages for the whole process."""
    from hydraloop.safety.allowlist import ALLOWLIST

    before = {name: set(value) if isinstance(value, set) else value for name, value in vars(ALLOWLIST).items()}
    yield
    vars(ALLOWLIST).update(before)


@pytest.fixture(autouse=True)
def _torch_unchanged() -> Iterator[None]:
    import torch

    before = _torch_settings()
    yield
    after = _torch_settings()
    if after == before:
        return
    torch.set_default_dtype(before["default dtype"])
    torch.set_num_threads(before["threads"])
    torch.use_deterministic_algorithms(before["deterministic"])
    torch.set_grad_enabled(before["grad mode"])
    torch.autograd.set_detect_anomaly(before["anomaly mode"])
    pytest.fail(f"the test changed torch's settings: {before} became {after}")


def _torch_settings() -> dict[str, Any]:
    import torch

    return {
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "profiler": torch.autograd._profiler_enabled(),
    }

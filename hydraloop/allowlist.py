"""Which `_target_`s a config may name: checked by name before anything is imported, and by origin afterwards.

A config can come from anywhere (a colleague, a sweep's file, the web), and instantiating it calls whatever it names. So
only these may be named: hydraloop's component packages, the public classes and functions of a few parts of torch and of
torchmetrics, the project's own files, and what `hydraloop.main(trusted=[…])` adds.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from hydraloop.errors import UserError, suggestion

COMPONENTS = tuple(
    f"hydraloop.{package}" for package in ("hooks", "tasks", "data", "models", "optim", "tracking", "compat")
)
LIBRARIES = ("torch.nn", "torch.optim", "torch.utils.data", "torch.profiler", "torchmetrics")
REFUSED = ("torch.utils.data.datapipes",)
"""Inside the libraries, but able to unpickle what a config hands them."""
_BUILTIN_ORIGINS = ("torch._C._nn",)
"""Where the functions of torch.nn.functional that are written in C++ say they are from."""
_NOT_A_PROJECT = ("site-packages", "dist-packages")
_OURSELVES = "hydraloop"
"""The rest of hydraloop is not for configs, even where its source lies in the project's folder: this list is in it."""


class Allowlist:
    """What may be instantiated in this process."""

    def __init__(self) -> None:
        self._folders: set[Path] = set()
        self._trusted: set[str] = set()

    def trust_folder(self, folder: Path) -> None:
        """Allow the Python files under the folder of whoever calls; environments in it are excepted."""
        self._folders.add(folder.resolve())

    def trust(self, packages: Iterable[str]) -> None:
        """Allow everything in these packages, named as one would import them (`timm`)."""
        self._trusted.update(packages)

    def locate(self, target: str, key: str) -> Any:
        """The object a `_target_` names.

        Args:
            target: dotted path, `torch.nn.Linear`.
            key: where in the config it stands, for the error.

        Raises:
            UserError: it is refused, or there is no such thing.
            Exception: whatever importing the project's own module raises.
        """
        if not _is_path(target):
            raise UserError(
                f"{target!r} is not the path of a class", key=f"{key}._target_", remedy="Write package.module.Class."
            )
        if not self._name_allowed(target):
            top_level = target.split(".")[0]
            if top_level not in sys.stdlib_module_names and _file_of(top_level) is None:
                raise _missing(target, f"there is no module {top_level!r}", (), key)
            raise self._refused(target, key)
        found = self._find(target, key)
        if isinstance(found, ModuleType) and self._origin_allowed(found.__name__):
            raise UserError(
                f"{target} is a module, not a class or function",
                key=f"{key}._target_",
                remedy=f"Name what is in it, {target}.Class.",
            )
        origin = _origin(found)
        if target not in self._trusted and (origin is None or not self._origin_allowed(origin)):
            where = f" (it comes from {origin})" if origin and not target.startswith(origin) else ""
            raise self._refused(target, key, where)
        if not callable(found):
            raise UserError(
                f"{target} is a {type(found).__name__}, not a class or function",
                key=f"{key}._target_",
                remedy="Name a class, or a function that returns the object.",
            )
        return found

    def _name_allowed(self, target: str) -> bool:
        parts = target.split(".")
        if _within(target, self._trusted):
            return True
        if _within(target, COMPONENTS) or _within(target, LIBRARIES):
            return not any(part.startswith("_") for part in parts) and not _within(target, REFUSED)
        if _within(target, (_OURSELVES,)):
            return False
        return parts[0] == "__main__" or self._is_project_file(_file_of(parts[0]))

    def _origin_allowed(self, origin: str) -> bool:
        """`origin` is the module the object was defined in."""
        if _within(origin, self._trusted):
            return True
        if _within(origin, (*COMPONENTS, *LIBRARIES, *_BUILTIN_ORIGINS)) and not _within(origin, REFUSED):
            return True
        if _within(origin, (_OURSELVES,)):
            return False
        if origin == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
            return True  # a notebook's own cells
        return self._is_project_file(getattr(sys.modules.get(origin), "__file__", None))

    def _is_project_file(self, file: str | None) -> bool:
        if file is None:
            return False
        path = Path(file).resolve()
        if any(part in _NOT_A_PROJECT for part in path.parts):
            return False
        standard = Path(sysconfig.get_paths()["stdlib"]).resolve()
        if path.is_relative_to(standard):
            return False
        return any(path.is_relative_to(folder) and not _in_environment(path, folder) for folder in self._folders)

    def _find(self, target: str, key: str) -> Any:
        """Import what must be imported, then follow attributes."""
        parts = target.split(".")
        found: Any = importlib.import_module(parts[0])
        for index, part in enumerate(parts[1:], start=1):
            path = ".".join(parts[: index + 1])
            if hasattr(found, part):
                found = getattr(found, part)
                continue
            file = _file_of(path) if isinstance(found, ModuleType) else None
            if file is None:
                raise _missing(target, f"{'.'.join(parts[:index])} has no {part!r}", _public(found), key, part)
            if not _within(path, (*self._trusted, *COMPONENTS, *LIBRARIES)) and not self._is_project_file(file):
                # A link, or an environment, inside the project.
                raise self._refused(target, key, f" (it comes from {file})")
            found = importlib.import_module(path)
        return found

    def _refused(self, target: str, key: str, where: str = "") -> UserError:
        top_level = target.split(".")[0]
        # Of torch and the standard library never all: both have functions that run what they are given.
        package = target if top_level == "torch" or top_level in sys.stdlib_module_names else top_level
        return UserError(
            f"{target}{where} is not among what a config may instantiate",
            key=f"{key}._target_",
            remedy=f'If you trust it, say so in train.py: hydraloop.main(trusted=["{package}"]). A class of your own '
            "works from any file under the folder of train.py.",
        )


ALLOWLIST = Allowlist()
"""What this process may instantiate; `main()` and `compose()` add their caller's folder."""


def _within(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _is_path(target: str) -> bool:
    parts = target.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def _in_environment(path: Path, folder: Path) -> bool:
    """Whether a virtual environment lies between the folder and the file."""
    for parent in path.parents:
        if parent == folder:
            return False
        if (parent / "pyvenv.cfg").exists():
            return True
    return False


def _file_of(name: str) -> str | None:
    """The file of a module, found without importing it (only what is above it); None where there is no such module."""
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__file__", None):
        return module.__file__
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.origin is None and spec.submodule_search_locations:  # a folder without __init__.py
        return str(Path(next(iter(spec.submodule_search_locations))) / "__init__.py")
    return spec.origin if spec.has_location else None


def _origin(found: Any) -> str | None:
    """The module an object was defined in."""
    if inspect.ismethod(found):  # a classmethod: Embedding.from_pretrained
        found = found.__self__ if isinstance(found.__self__, type) else type(found.__self__)
    origin = getattr(found, "__module__", None)
    return origin if isinstance(origin, str) else None


def _public(found: Any) -> list[str]:
    """The names in a module or class that a target may go on with: what can be called, and a package's modules."""
    names = [name for name in dir(found) if callable(getattr(found, name, None))]
    modules = [module.name for module in pkgutil.iter_modules(getattr(found, "__path__", []))]
    return [name for name in (*modules, *names) if not name.startswith("_")]


def _missing(target: str, problem: str, known: Iterable[str], key: str, part: str | None = None) -> UserError:
    hint = suggestion(part, known) if part is not None else "Check the spelling, or install the package."
    if len(hint) > 200:
        hint = "Check the spelling."
    return UserError(f"{target} does not exist: {problem}", key=f"{key}._target_", remedy=hint)

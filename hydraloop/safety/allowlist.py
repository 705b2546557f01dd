"""Which `_target_`s a config may name: the name is checked before anything is imported, the object after.

A config can come from anywhere (a colleague, a sweep's file, the web), and to instantiate it is to call the functions
that it names. Allowed are hydraloop's components and parts of torch and torchmetrics (`public_targets.py`), the
project's files, and what `hydraloop.main(trusted=[…])` adds; of these, only classes, classmethods and functions of a
module.

Hydra's own checks do not replace this. Hydra 1.3 blocks a list of known dangerous targets; 1.4 allows targets by their
names, and knows neither the project's folder nor which part of a library is public.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hydraloop.errors import UserError, suggestion
from hydraloop.safety.public_targets import PACKAGES, REFUSED, is_offered, is_public, needs_no_object, within

_RUN_FOLDERS = ("outputs", "multirun")
"""Folders of a project that contain its runs, and no code."""
_NOT_A_PROJECT = ("site-packages", "dist-packages")
_OURSELVES = "hydraloop"
"""The rest of hydraloop is refused, even if its source is in the project's folder: it contains this list."""


class Advice(NamedTuple):
    """How the user of this process can trust a class."""

    call: str
    """The call that takes the trusted packages, up to its argument `trusted`."""
    folder: str
    """The folder whose Python files are trusted."""
    command: str = ""
    """What to type instead, because this process trusts only hydraloop and torch."""


def from_python(function: str) -> Advice:
    """Return the advice for a call of `hydraloop.<function>`."""
    return Advice(f"write: hydraloop.{function}(…, ", f"the folder of the file that calls {function}()")


IN_MAIN = Advice("write in train.py: hydraloop.main(", "the folder of train.py")


class Allowlist:
    """What may be instantiated in this process."""

    def __init__(self) -> None:
        self._folders: set[Path] = set()
        self._untrusted: set[Path] = set()
        self._trusted: set[str] = set()
        self.advice: Advice | None = None
        """How the user can trust a package, for messages. None: by an argument of `compose`."""

    def trust_folder(self, folder: Path) -> None:
        """Allow the Python files under the caller's folder, except virtual environments and runs in it."""
        self._folders.add(folder.resolve())
        self._untrusted.update(folder.resolve() / name for name in _RUN_FOLDERS)

    def distrust(self, folder: Path) -> None:
        """Refuse the Python files under a folder, also if it is in a trusted folder: a run may come from anywhere."""
        self._untrusted.add(folder.resolve())

    def trust(self, packages: Iterable[str]) -> None:
        """Allow everything in these packages, named as in an import (`timm`)."""
        self._trusted.update(packages)

    @contextmanager
    def trusting(self, folder: Path, packages: Iterable[str], advice: Advice) -> Iterator[None]:
        """In the body, also allow this folder and these packages, and give this advice."""
        new_folder = {folder.resolve()} - self._folders
        new_packages = set(packages) - self._trusted
        before = self.advice
        self._folders |= new_folder
        self._trusted |= new_packages
        self.advice = advice
        try:
            yield
        finally:  # not what was there before the body: another thread may be in another body
            self._folders -= new_folder
            self._trusted -= new_packages
            self.advice = before

    @property
    def folders(self) -> list[str]:
        """The trusted folders, for another process."""
        return sorted(map(str, self._folders))

    @property
    def packages(self) -> list[str]:
        """The trusted packages, for another process."""
        return sorted(self._trusted)

    @property
    def _advice(self) -> Advice:
        return self.advice or from_python("compose")

    def remedy(self, *packages: str) -> str:
        """Return the call that trusts these packages and those that are trusted now, for messages."""
        names = ", ".join(f'"{name}"' for name in sorted({*self._trusted, *packages}))
        return f"{self._advice.call}trusted=[{names}])."

    def locate(self, target: str, key: str) -> Any:
        """Return the object that a `_target_` names.

        Args:
            target: dotted path, `torch.nn.Linear`.
            key: of the config node, for the error.

        Raises:
            UserError: it is refused or does not exist.
            Exception: raised by a module of the project while it is imported.
        """
        if not _is_path(target):
            raise UserError(
                f"{target!r} is not the path of a class", key=f"{key}._target_", remedy="Write package.module.Class."
            )
        if not self._name_allowed(target):
            top_level = target.split(".")[0]
            if self._advice.command and not within(target, (*PACKAGES, _OURSELVES)):
                problem = f"{target} is not a class of hydraloop or torch, and no project is trusted here"
                remedy = f"Let the project's script do it: {self._advice.command}"
                raise UserError(problem, key=f"{key}._target_", remedy=remedy)
            if top_level not in sys.stdlib_module_names and _file_of(top_level) is None:
                raise self._no_module(target, key)
            raise self._refused(target, key)
        obj, owner = self._import(target, key)
        if target in self._trusted and callable(obj):
            return obj
        origin = _origin(obj)
        if not self._object_allowed(obj, origin):
            where = f" (it comes from {origin})" if origin and not target.startswith(origin) else ""
            raise self._refused(target, key, where, _package(origin, target) if origin else target)
        # Trusted packages may have other kinds of functions, such as NumPy's.
        trusted = isinstance(owner, ModuleType) and callable(obj) and within(origin or "", self._trusted)
        if not trusted and not needs_no_object(obj, owner):
            raise UserError(
                f"{target} is not a class, a classmethod or a function of a module",
                key=f"{key}._target_",
                remedy="Name one of these; a function may return the object you want.",
            )
        return obj

    def _name_allowed(self, target: str) -> bool:
        if within(target, self._trusted) or is_public(target):
            return True
        if within(target, (*PACKAGES, _OURSELVES)):
            return False
        top_level = target.split(".")[0]
        return top_level == "__main__" or self.is_project_file(_file_of(top_level))

    def _object_allowed(self, obj: Any, origin: str | None) -> bool:
        """`origin` is the module in which the object was defined."""
        if is_offered(obj, origin):
            return True
        if origin is None or (within(origin, PACKAGES) and not within(origin, self._trusted)):
            return False
        return self._origin_allowed(origin)

    def _origin_allowed(self, origin: str) -> bool:
        if within(origin, self._trusted) or (within(origin, PACKAGES) and not within(origin, REFUSED)):
            return True
        if within(origin, (_OURSELVES,)):
            return False
        main = sys.modules["__main__"]
        if origin == "__main__" and not hasattr(main, "__file__"):
            return True  # the cells of a notebook
        return self.is_project_file(getattr(sys.modules.get(origin), "__file__", None))

    def is_project_file(self, file: str | None) -> bool:
        """Return whether a file is code of the project: in a trusted folder, and not installed and not in a run."""
        if file is None:
            return False
        path = Path(file).resolve()
        if any(part in _NOT_A_PROJECT for part in path.parts) or any(map(path.is_relative_to, self._untrusted)):
            return False
        if path.is_relative_to(Path(sysconfig.get_paths()["stdlib"]).resolve()):
            return False
        return any(path.is_relative_to(folder) and not _in_environment(path, folder) for folder in self._folders)

    def _import(self, target: str, key: str) -> tuple[Any, Any]:
        """Import modules and follow attributes. Returns the object, and the module or class that has it."""
        parts = target.split(".")
        try:
            obj: Any = importlib.import_module(parts[0])
        except ModuleNotFoundError as error:
            if error.name != parts[0]:
                raise
            raise self._no_module(target, key) from None
        owner: Any = None
        for index, part in enumerate(parts[1:], start=1):
            path = ".".join(parts[: index + 1])
            if hasattr(obj, part):
                obj, owner = getattr(obj, part), obj
                continue
            file = _file_of(path) if isinstance(obj, ModuleType) else None
            if file is None:
                # Packages leave out a class whose own requirements are missing.
                is_own = self.is_project_file(getattr(obj, "__file__", None))
                problem = f"{'.'.join(parts[:index])} has no {part!r}"
                problem += "" if is_own else " with the installed packages"
                raise UserError(problem, key=f"{key}._target_", remedy=suggestion(part, _public(obj)))
            allowed = target in self._trusted or within(path, (*self._trusted, *PACKAGES))
            if not allowed and not self.is_project_file(file):  # a link or an environment in the project
                raise self._refused(target, key, f" (it comes from {file})")
            obj, owner = importlib.import_module(path), obj
        return obj, owner

    def _refused(self, target: str, key: str, where: str = "", package: str | None = None) -> UserError:
        """Make the error. `package` is what has to be trusted, by default that of the target."""
        package = _package(target, target) if package is None else package
        remedy = f"If you trust it, {self.remedy(package)} Classes in {self._advice.folder} are always allowed."
        if not package:
            remedy = f"Name a function of your own that does what you need, in {self._advice.folder}."
        return UserError(f"a config may not instantiate {target}{where}", key=f"{key}._target_", remedy=remedy)

    def _no_module(self, target: str, key: str) -> UserError:
        problem = f"{target} does not exist: there is no module {target.split('.')[0]!r}"
        remedy = "Check the spelling, or install the package."
        return UserError(problem, key=f"{key}._target_", remedy=remedy)


ALLOWLIST = Allowlist()
"""What this process may instantiate. `main()` adds its caller's folder; `compose`, `build` and `load` do so until they
return."""


def _is_path(target: str) -> bool:
    parts = target.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def _package(module: str, target: str) -> str:
    """Return what to trust for a target in a module: the package, or the target itself; empty for Python's own.

    Python's own modules have functions that execute what they are given, or write it to any file.
    """
    package = module.split(".")[0]
    if package in sys.stdlib_module_names:
        return ""
    return target if package in ("torch", _OURSELVES) else package  # they have such functions, too


def _in_environment(path: Path, folder: Path) -> bool:
    """Return whether the file is in a virtual environment inside the folder."""
    for parent in path.parents:
        if parent == folder:
            return False
        if (parent / "pyvenv.cfg").exists():
            return True
    return False


def _file_of(name: str) -> str | None:
    """Return the file of a module, and import only its parents; None if there is no such module."""
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


def _origin(obj: Any) -> str | None:
    """Return the module in which an object was defined; a module's own name."""
    if isinstance(obj, ModuleType):
        return obj.__name__
    if inspect.ismethod(obj):  # a classmethod: Embedding.from_pretrained
        obj = obj.__self__ if isinstance(obj.__self__, type) else type(obj.__self__)
    origin = getattr(obj, "__module__", None)
    return origin if isinstance(origin, str) else None


def _public(obj: Any) -> list[str]:
    """Return the public names in a module or class that can be called or, in a package, imported."""
    names = [name for name in dir(obj) if callable(getattr(obj, name, None))]
    modules = [module.name for module in pkgutil.iter_modules(getattr(obj, "__path__", []))]
    return [name for name in (*modules, *names) if not name.startswith("_")]

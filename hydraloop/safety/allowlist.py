"""Which `_target_`s a config may name: checked by name before anything is imported, and by origin afterwards.

A config can come from anywhere (a colleague, a sweep's file, the web), and instantiating it calls whatever it names. So
only these may be named: what hydraloop's component packages export, the public classes and functions of a few parts of
torch and of torchmetrics (allowed.py), the project's own files, and what `hydraloop.main(trusted=[…])` adds. Of all of
them, only what needs no object to be called on: classes, classmethods, functions of a module.
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
from hydraloop.safety.allowed_names import (
    COMPONENTS,
    LIBRARIES,
    REFUSED,
    is_constructor,
    is_ours_or_a_library,
    is_public,
    within,
)

_NOT_A_PROJECT = ("site-packages", "dist-packages")
_OURSELVES = "hydraloop"
"""The rest of hydraloop is not for configs, even where its source lies in the project's folder: this list is in it."""


class Allowlist:
    """What may be instantiated in this process."""

    def __init__(self) -> None:
        self._folders: set[Path] = set()
        self._trusted: set[str] = set()
        self.is_in_main = False
        """Whether `main()` is running, which then is what a remedy names; else `compose()`."""

    def trust_folder(self, folder: Path) -> None:
        """Allow the Python files under the folder of whoever calls; environments in it are excepted."""
        self._folders.add(folder.resolve())

    def trust(self, packages: Iterable[str]) -> None:
        """Allow everything in these packages, named as one would import them (`timm`)."""
        self._trusted.update(packages)

    def may_import(self, module: str) -> bool:
        """Whether a module is trusted, or one of the project's."""
        if within(module, self._trusted):
            return True
        top_level = module.split(".")[0]
        if not module.replace(".", "a").isidentifier() or top_level == _OURSELVES:
            return False
        return self._is_project_file(_file_of(top_level)) and self._is_project_file(_file_of(module))

    def remedy(self, *packages: str) -> str:
        """The call that trusts these packages, besides those that are trusted now."""
        names = ", ".join(f'"{name}"' for name in sorted({*self._trusted, *packages}))
        if self.is_in_main:
            return f"say so in train.py: hydraloop.main(trusted=[{names}])."
        return f"say so where you compose the config: hydraloop.compose(…, trusted=[{names}])."

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
        found, owner = self._find(target, key)
        if isinstance(found, ModuleType) and self._origin_allowed(found.__name__):
            raise UserError(
                f"{target} is a module, not a class or function",
                key=f"{key}._target_",
                remedy=f"Name what is in it, {target}.Class.",
            )
        if target in self._trusted and callable(found):
            return found
        origin = _origin(found)
        if not self._object_allowed(found, origin):
            where = f" (it comes from {origin})" if origin and not target.startswith(origin) else ""
            raise self._refused(target, key, where, _package(origin, target) if origin else target)
        # Packages that are trusted also have functions of their own kind, such as NumPy's.
        of_its_own = isinstance(owner, ModuleType) and callable(found) and within(origin or "", self._trusted)
        if not of_its_own and not is_constructor(found, owner):
            raise UserError(
                f"{target} is not a class, a classmethod or a function of a module",
                key=f"{key}._target_",
                remedy="Name one of these; a function may return the object you want.",
            )
        return found

    def _name_allowed(self, target: str) -> bool:
        parts = target.split(".")
        if within(target, self._trusted):
            return True
        if within(target, (*COMPONENTS, *LIBRARIES)):
            return is_public(target)
        if within(target, (_OURSELVES,)):
            return False
        return parts[0] == "__main__" or self._is_project_file(_file_of(parts[0]))

    def _object_allowed(self, found: Any, origin: str | None) -> bool:
        """`origin` is the module the object was defined in."""
        if is_ours_or_a_library(found, origin):
            return True
        if origin is None or (within(origin, (*COMPONENTS, *LIBRARIES)) and not within(origin, self._trusted)):
            return False
        return self._origin_allowed(origin)

    def _origin_allowed(self, origin: str) -> bool:
        if within(origin, self._trusted):
            return True
        if within(origin, (*COMPONENTS, *LIBRARIES)) and not within(origin, REFUSED):
            return True
        if within(origin, (_OURSELVES,)):
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

    def _find(self, target: str, key: str) -> tuple[Any, Any]:
        """Import what must be imported, then follow attributes. Returns the object, and what it was found in."""
        parts = target.split(".")
        found: Any = importlib.import_module(parts[0])
        owner: Any = None
        for index, part in enumerate(parts[1:], start=1):
            path = ".".join(parts[: index + 1])
            if hasattr(found, part):
                found, owner = getattr(found, part), found
                continue
            file = _file_of(path) if isinstance(found, ModuleType) else None
            if file is None:
                raise _missing(target, f"{'.'.join(parts[:index])} has no {part!r}", _public(found), key, part)
            allowed = target in self._trusted or within(path, (*self._trusted, *COMPONENTS, *LIBRARIES))
            if not allowed and not self._is_project_file(file):
                # A link, or an environment, inside the project.
                raise self._refused(target, key, f" (it comes from {file})")
            found, owner = importlib.import_module(path), found
        return found, owner

    def _refused(self, target: str, key: str, where: str = "", package: str | None = None) -> UserError:
        """The error; `package` is what has to be trusted, None: that of the target."""
        package = package or _package(target, target)
        folder = "train.py" if self.is_in_main else "the file that calls compose()"
        return UserError(
            f"{target}{where} is not among what a config may instantiate",
            key=f"{key}._target_",
            remedy=f"If you trust it, {self.remedy(package)} A class of your own works from any file under the folder "
            f"of {folder}.",
        )


ALLOWLIST = Allowlist()
"""What this process may instantiate; `main()` and `compose()` add their caller's folder."""


def _is_path(target: str) -> bool:
    parts = target.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def _package(module: str, target: str) -> str:
    """What to trust for a target that is in a module: the package, or the target itself."""
    package, *rest = module.split(".")
    if package == "hydra_plugins" and rest:  # a folder that all plugins share
        return f"{package}.{rest[0]}"
    # Of these never all: they have functions that run what they are given, or write it to any file.
    return target if package in ("torch", _OURSELVES) or package in sys.stdlib_module_names else package


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

"""Composes configs by Hydra's Compose API, so that mistakes are found before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.initialize import get_gh_backup, restore_gh_from_backup
from hydra.plugins.config_source import ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from hydraloop.config.arguments import LIST_GROUPS, check_text
from hydraloop.config.hydra_keys import check_overrides, check_typed, of_hydra
from hydraloop.config.project_classes import with_own_arguments
from hydraloop.errors import UserError, missing_path
from hydraloop.files.run_directory import run_id
from hydraloop.safety import hydra_versions

_read_header = ConfigSource._get_header_dict


def _read_header_after_mark(text: str) -> dict[str, str | None]:
    """Return the `# @package` of a file, also after a byte-order mark."""
    return _read_header(text.removeprefix("\ufeff"))


# Hydra opens files as UTF-8, which keeps the byte-order mark. Its classes that read files cannot be replaced.
ConfigSource._get_header_dict = staticmethod(_read_header_after_mark)  # type: ignore[method-assign, assignment]


class Composer:
    """Composes configs of one project. `opened` makes it. Only one composer can be open at a time.

    Args:
        name: of the primary config, without `.yaml`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._results: dict[tuple[str, ...], DictConfig | Exception] = {}
        """The results of `compose`, or the errors, by overrides."""
        self._is_group: dict[str, bool] = {}
        """The results of `is_group`."""

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Return the config of one job, with the node `hydra`.

        Raises:
            UserError: an option of Hydra is not supported.
            Exception: raised by Hydra.
        """
        key = tuple(overrides)
        if key not in self._results:  # composing takes about 100 ms, also if it fails
            try:
                self._results[key] = self._composed(
                    overrides, partial(hydra.compose, self.name, return_hydra_config=True)
                )
            except Exception as error:
                self._results[key] = error
        result = self._results[key]
        if isinstance(result, Exception):
            raise result
        return result

    def compose_sweep(self, overrides: Sequence[str]) -> DictConfig:
        """Return the config that Hydra composes for a sweep before its jobs: without the values that are swept."""
        load = GlobalHydra.instance().config_loader().load_configuration
        return self._composed(overrides, partial(load, self.name, run_mode=RunMode.MULTIRUN))

    def _composed(self, overrides: Sequence[str], compose: Callable[..., DictConfig]) -> DictConfig:
        """Return the config that `compose` makes, with Hydra's options checked.

        Hydra refuses a key that the config does not have. If the key is an argument of a user's class, it gets a `++`.
        """
        check_typed(of_hydra(overrides), self.content(self.name))
        try:
            cfg = compose(overrides=list(overrides))
        except HydraException as error:
            lines = with_own_arguments(error, overrides)
            if lines == list(overrides):
                raise
            cfg = compose(overrides=lines)
        check_overrides(cfg, overrides)
        self.drop_unselected(cfg, overrides)
        return cfg

    def drop_unselected(self, cfg: DictConfig, overrides: Sequence[str]) -> None:
        """Remove the values that files set for a hook or a schedule which a typed `hooks=…` does not select.

        Without such a selection, they are a mistake: somebody has forgotten to select the option.
        """
        typed = [line.lstrip("+").partition("=")[0] for line in overrides]
        for group in LIST_GROUPS:
            nodes = cfg.get(group) if group in typed else None
            content: Any = OmegaConf.to_container(nodes, resolve=False) if isinstance(nodes, DictConfig) else {}
            left = {name for name, node in content.items() if isinstance(node, dict) and "_target_" not in node}
            for name in left & {*self.options(group)} if left else ():
                if not any(key.startswith(f"{group}.{name}.") for key in typed):
                    with open_dict(cfg):
                        del cfg[group][name]

    def complete(self, overrides: Sequence[str]) -> None:
        """Let Hydra print the completions of the command line in COMP_LINE, for a shell.

        Raises:
            Exception: the command line has a mistake.
        """
        check_typed([], self.content(self.name))
        hydra: Any = GlobalHydra.instance().hydra
        hydra.shell_completion(self.name, list(overrides))

    def options(self, group: str) -> list[str]:
        """Return the options of a config group."""
        return self._listed(group, ObjectType.CONFIG)

    def option(self, group: str, name: str) -> tuple[DictConfig, str]:
        """Return the content of an option's file, without what its defaults list adds, and its place: `hooks.ema`.

        Raises:
            UserError: the file is not a mapping.
            Exception: raised by Hydra.
        """
        found = self._source(f"{group}/{name}").load_config(f"{group}/{name}")
        if not isinstance(found.config, DictConfig):
            raise UserError(
                "it is not a mapping", key=f"{group}/{name}.yaml", remedy="Write lines of the form key: value."
            )
        return found.config, found.header.get("package") or group

    def file(self, path: str) -> Path | None:
        """Return the file of a config. None: the config is stored in Hydra's ConfigStore.

        Args:
            path: `group/option`, or the name of the primary config.
        """
        source = self._source(path)
        return Path(source.path, f"{path}.yaml") if source.scheme() == "file" else None

    def content(self, path: str) -> DictConfig:
        """Return the content of a config file, with its defaults list. Without such a file, it is empty.

        Args:
            path: without `.yaml`.
        """
        sources = GlobalHydra.instance().config_loader().get_sources()
        found = next((source.load_config(path).config for source in sources if source.is_config(path)), None)
        return found if isinstance(found, DictConfig) else OmegaConf.create()

    def _source(self, path: str) -> ConfigSource:
        sources = GlobalHydra.instance().config_loader().get_sources()
        return next(source for source in sources if source.is_config(path))

    def is_group(self, key: str) -> bool:
        """Return whether `key=` selects an option of a config group in Hydra."""
        if key not in self._is_group:
            sources = GlobalHydra.instance().config_loader().get_sources()
            self._is_group[key] = any(source.is_group(key) for source in sources)
        return self._is_group[key]

    def groups(self) -> list[str]:
        """Return all config groups except Hydra's own."""
        return [group for group in self._listed("", ObjectType.GROUP) if group not in ("hydra", "hydraloop")]

    def _listed(self, group: str, kind: ObjectType) -> list[str]:
        sources = GlobalHydra.instance().config_loader().get_sources()
        return sorted({name for source in sources if source.is_group(group) for name in source.list(group, kind)})


class _ExtraFolder(SearchPathPlugin):
    """Adds Hydra's --config-dir to the search path while a composer is open."""

    folder: Path | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folder. Hydra calls this for each search path that it makes."""
        if self.folder is not None:
            search_path.append("command-line", f"file://{self.folder.resolve()}")


@contextmanager
def opened(folder: Path, name: str, extra_folder: str | Path | None = None) -> Iterator[Composer]:
    """Open a composer, and close it at the end.

    Args:
        folder: of the config files.
        name: of the primary config, without `.yaml`.
        extra_folder: searched after `folder` (Hydra's --config-dir).

    Raises:
        UserError: a folder does not exist, or its path is not valid text.
    """
    check_text(str(Path.cwd()))  # Hydra records the working directory
    extra = None if extra_folder is None else Path(extra_folder)
    for path, key in ((folder, "--config-path"), (extra, "--config-dir")):
        check_text(str(path))
        if path is not None and not path.is_dir():
            remedy = missing_path(path, "Create it, with a config.yaml in it.")
            raise UserError(f"the folder {path} does not exist", key=key, remedy=remedy)
    hydra_versions.register_resolver("run_id", run_id)  # ${run_id:} has one value in a config
    Plugins.instance().register(_ExtraFolder)

    # The caller may be inside `hydra.initialize`, or inside another composer.
    hydra_before = get_gh_backup()
    folder_before = _ExtraFolder.folder
    GlobalHydra.instance().clear()
    _ExtraFolder.folder = extra
    try:
        with hydra.initialize_config_dir(str(folder.absolute()), "train", **hydra_versions.BASE):
            yield Composer(name)
    finally:
        _ExtraFolder.folder = folder_before
        restore_gh_from_backup(hydra_before)

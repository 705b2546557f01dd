"""Keys of the user's own at the top of a config file: accepted, unless they look like a mistake. Imports no torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf

from hydraloop.cli import arguments
from hydraloop.cli.compose import Composer
from hydraloop.cli.config_file_limits import leaves
from hydraloop.errors import UserError, any_of, close_names
from hydraloop.schemas.root import Config

_OPTIONS = [entry.name for entry in dataclasses.fields(Config)]
_SHORT = re.compile(r"(optimizer|engine|precision|distributed|data\.loader)\.(?:.*\.)?(?P<name>[^.\[]+)")
"""Options whose last name alone, at the top of a file, is a mistake: `lr`, `max_epochs`, `batch_size`."""
_ALIKE = 0.8
"""Resemblance to an option. `sed` has 0.86 and `hoks` 0.89; `depth`, an own key, has 0.73 because of `detach`."""


def check_own_keys(cfg: DictConfig, lines: Sequence[str], composer: Composer) -> None:
    """Refuse a top-level key of a config file that no interpolation names, if it looks like an option or a group.

    Args:
        cfg: as composed from `lines`.
        lines: the overrides. A key that they add with a + is not checked.

    Raises:
        UserError: names the file.
    """
    own = [str(name) for name in cfg if name not in (*_OPTIONS, "hydra")]
    if not own:
        return
    parsed = arguments.parse(lines)
    added = {one.key_or_group.partition(".")[0] for one in parsed if one.is_add() or one.is_force_add()}
    written = dict(leaves(OmegaConf.to_container(cfg, resolve=False), ""))
    texts = "\n".join(value for value in written.values() if isinstance(value, str) and "${" in value)
    for name in own:
        if name not in added and not re.search(rf"\$\{{[^}}]*\b{re.escape(name)}\b", texts):
            _check_unused(name, written, lines, composer)


def _check_unused(name: str, written: dict[str, object], lines: Sequence[str], composer: Composer) -> None:
    options = [key[1:] for key in written if (found := _SHORT.fullmatch(key[1:])) and found["name"] == name]
    meant = options[:3] or close_names(name, _OPTIONS, most=1, cutoff=_ALIKE)
    is_group = name in composer.groups()
    if not (meant or is_group):
        return
    file = next(_files_with(name, lines, composer), composer.name)
    if file.startswith(f"{name}/"):
        package = "task.model" if name == "model" else "_global_"
        raise UserError(
            f"{file}.yaml sets the key {name}, which nothing uses",
            key=name,
            remedy=f"Begin the file with the line, before any comment: # @package {package}",
        )
    if is_group:
        line = line_for_defaults(name, str(written.get(f".{name}", "…")), file, composer)
        remedy = f"To select an option of this group, write it in the defaults list: {line}"
        meant = ["task.model"] if name == "model" else []
    else:
        remedy = f"To keep a key of your own with this name, use it: ${{{name}}}."
    near = f"Did you mean {any_of(meant)}? " if meant else ""
    problem = f"{file}.yaml is merged into the options, which have no {name}"
    raise UserError(problem, key=name, remedy=f"{near}{remedy}")


def selected_in_body(file: str, composer: Composer) -> Iterator[tuple[str, str]]:
    """Yield (group, option) of each selection in a config file beside its defaults list: `optimizer: sgd`."""
    body = composer.content(file)
    for group in composer.groups():
        value = body.get(group)
        names = value if isinstance(value, ListConfig) else [value]
        if names and all(isinstance(name, str) for name in names):
            listed = f"[{', '.join(names)}]"
            yield group, listed if group in arguments.LIST_GROUPS or value is not names[0] else names[0]


def as_listed(line: str, file: str, composer: Composer) -> str:
    """Return a line for the defaults list of a config file, without its dash if the list is in brackets."""
    path = composer.file(file)
    in_brackets = path is not None and re.search(r"^defaults: *\[", path.read_text(encoding="utf-8-sig"), re.MULTILINE)
    return line.removeprefix("- ") if in_brackets else line


def line_for_defaults(group: str, option: str, file: str, composer: Composer) -> str:
    """Return the line for the defaults list of a config file that selects an option."""
    return as_listed(_line(group, option, file, composer), file, composer)


def _line(group: str, option: str, file: str, composer: Composer) -> str:
    own = [entry for entry in composer.content(file).get("defaults", ()) if isinstance(entry, DictConfig)]
    for name, old in [item for entry in own for item in entry.items()]:
        if name in (group, f"/{group}"):
            return f"- {name}: {option}" + ("" if old == option else f" instead of {old}".replace("'", ""))
    probe = f"{group}=[]" if group in arguments.LIST_GROUPS else f"~{group}"
    try:
        GlobalHydra.instance().config_loader().compute_defaults_list(composer.name, [probe], RunMode.RUN)
    except HydraException:  # no defaults list has the group
        return f"- {group if file == composer.name else f'/{group}'}: {option}"
    return f"- override /{group}: {option}"


def _files_with(name: str, lines: Sequence[str], composer: Composer) -> Iterator[str]:
    """Yield the config files that have a top-level key, the last one first, without `.yaml`."""
    loader = GlobalHydra.instance().config_loader()
    for default in reversed(loader.compute_defaults_list(composer.name, list(lines), RunMode.RUN).defaults):
        path = default.config_path or ""
        if path.startswith(f"{name}/") or name in composer.content(path):
            yield path

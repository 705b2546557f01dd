"""What the texts of Hydra's and OmegaConf's errors mean."""

from __future__ import annotations

import re
from collections.abc import Callable

from hydraloop.cli.composing_errors import files, hooks, overrides
from hydraloop.cli.composing_errors.case import Case
from hydraloop.cli.composing_errors.hints import first_line
from hydraloop.errors import UserError


def _something_else(case: Case, found: re.Match[str]) -> UserError:
    cause = "" if case.cause == case.text else f": {first_line(case.cause)}"
    problem = " ".join(line.strip() for line in case.text.splitlines() if line.strip()) + cause
    return UserError(problem, remedy="Check the config files, or set HYDRA_FULL_ERROR=1 to see the traceback.")


_Meanings = tuple[tuple[str, tuple[str, ...] | Callable[[Case, re.Match[str]], UserError | None]], ...]
"""(Pattern in the text of the error or its cause, what it means). The first one that matches counts. What it means is
the key, the problem and the remedy; or a function, which returns None if it means something else."""

_LIST = "Write the whole list: {case.parent}=[…]; a mapping in it is {{…}}."
_SECOND = "{found[name]} is not the only option"
_SEVERAL = "Select one: optimizer={found[name]}. For several optimizers: see docs/how-to/optimizers.md."
_YAML = (
    "Correct this line or the one before it. YAML takes key: value, each key once, spaces and no tabs. A list in "
    "brackets, [a, b], has no dashes."
)
_TWICE = "the option is selected twice"
OF_SWEEPS: _Meanings = (
    (r"^Ambiguous value", overrides.several_values),
    (r"requires --multirun", ("{case.key}", "{case.line} is a sweep", "Add -m to run it.")),
)
OF_OVERRIDES: _Meanings = (
    (
        r"^Multiple values for",
        ("{case.key}", _TWICE, "Leave the + out: {case.key}=… changes the selection."),
    ),
    (r"", hooks.not_selected),
    (r"", hooks.not_a_list),
    (r"does not support deletion", overrides.cannot_be_deleted),
    (r"^Could not delete", overrides.not_there),
    (r"No match in the defaults list", overrides.not_in_the_defaults),
    (r"^Could not override|No match in the defaults list|does not exist", overrides.unknown_key),
    (r"^Could not append", overrides.exists_already),
    (r"\(str\) is not an int", ("{case.parent}", "it is a list", _LIST)),
    (r"", overrides.wrong_value),
)
OF_FILES: _Meanings = (
    (
        r"^Multiple values for (?P<key>\S+?)\..*'override \S+: (?P<name>[^']*)'",
        ("{found[key]}", _TWICE, "Write override in the defaults list: - override /{found[key]}: {found[name]}"),
    ),
    (r"^In '(?P<file>[^']+)': .*Key '[^']+' (not in|is not in struct).*full_key: (?P<key>\S+)", files.new_in_a_file),
    (
        r"^In '[^']+': Could not override '(?P<key>[^']+)'",
        ("{found[key]}", "no defaults list has it, and so override finds nothing", "Write - /{found[key]}: …"),
    ),
    (r"^In '(?P<file>[^']+)': .*(Cannot merge|Cannot assign str|Merge error: str )", files.selected_in_a_file),
    (
        r"^In 'optimizer/(?P<name>[^']+)': .*Merge error: \w+ is not a subclass",
        ("optimizer", _SECOND, _SEVERAL),
    ),
    (
        r"^In '(?P<group>[^']+)/(?P<name>[^']+)': .*Merge error: \w+ is not a subclass",
        ("{found[group]}", _SECOND, "Select one: {found[group]}={found[name]}."),
    ),
    (
        r"^In '(?P<file>[^']+)': ValidationError[^\n]*\n(?P<problem>[^\n]+)\n\s*full_key: (?P<key>\S+)",
        files.wrong_in_a_file,
    ),
    (
        r"^(.*\n)?(?P<problem>[^\n]+)\n  in \"(?P<file>[^\"]+)\", line (?P<line>\d+)",
        ("{found[file]}", "line {found[line]}: {found[problem]}", _YAML),
    ),
    (r"", _something_else),
)

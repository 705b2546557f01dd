"""`hydraloop …` or `python -m hydraloop …`: train with conf/ of the working directory, or run one of the commands."""

import sys
from pathlib import Path

from hydraloop.early_interrupts import deferred, in_one_line

with deferred():
    from hydraloop.commands.parser import COMMANDS, listing
    from hydraloop.run_files.output import replace_unencodable


def _resume() -> None:
    from hydraloop.app import main
    from hydraloop.cli.resume_command import trusted

    folder, packages, sys.argv[1:] = trusted(sys.argv[1:])
    main(folder=folder, trusted=packages)


def _train(name: str) -> None:
    """Train, if a config is here.

    Args:
        name: the first argument. It may be a misspelt command.
    """
    from hydraloop.errors import UserError, close_names, suggestion

    has_config = Path("conf").is_dir() or any(text.startswith(("--config-path", "-cp")) for text in sys.argv[1:])
    near = "=" not in name and close_names(name, COMMANDS, most=1, cutoff=0.7)
    if near or not has_config:
        usage = f"""{listing()}
  python -m hydraloop [key=value …]    train with the folder conf here; --help lists the options"""
        if {"-h", "--help"}.intersection(sys.argv):
            from hydraloop.cli.help import show

            show(usage)
            return
        add = "To write a project: hydraloop new my_project"
        error = UserError("there is no folder conf here, so nothing can be trained", remedy=add)
        if near:
            error = UserError(f"there is no command {name}", remedy=suggestion(name, near))
        print(f"error: {error}\n{usage}", file=sys.stderr)
        sys.exit(2)
    from hydraloop.app import main

    main(folder=Path.cwd())


def main() -> None:
    """The command `hydraloop`, which is the same as `python -m hydraloop`."""
    with in_one_line():
        replace_unencodable()
        name = next(iter(sys.argv[1:]), "")
        if not sys.flags.safe_path:
            del sys.path[0]  # the folder of the command, or the working directory
            if name not in COMMANDS:  # these import nothing from the working directory until it is trusted
                sys.path.insert(0, str(Path.cwd()))
        if name == "resume":
            _resume()
        elif name in COMMANDS:
            from hydraloop.commands.dispatch import run

            sys.exit(run(sys.argv[1:]))
        else:
            _train(name)


if __name__ == "__main__":
    main()

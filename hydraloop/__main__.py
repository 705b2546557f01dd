"""`hydraloop …` or `python -m hydraloop …`: train with conf/ of the working directory, or run one of the commands."""

import sys
from pathlib import Path

from hydraloop import platforms
from hydraloop.commands.parser import COMMANDS, listing


def _resume() -> None:
    from hydraloop.app import main
    from hydraloop.cli.resume_command import trusted

    folder, packages, sys.argv[1:] = trusted(sys.argv[1:])
    main(folder=folder, trusted=packages)


def _train() -> None:
    if not Path("conf").is_dir() and not any(text.startswith(("--config-path", "-cp")) for text in sys.argv[1:]):
        usage = f"""{listing()}
  python -m hydraloop [key=value …]    train with the folder conf here; --help lists the options"""
        if {"-h", "--help"}.intersection(sys.argv):
            print(usage)
            return
        add = "To write a project: hydraloop new my_project. To add conf/ and train.py here: hydraloop new --here"
        problem = "error: there is no folder conf here, so nothing can be trained"
        print(f"{problem}\n  {add}\n{usage}", file=sys.stderr)
        sys.exit(2)
    from hydraloop.app import main

    main(folder=Path.cwd())


def main() -> None:
    """The command `hydraloop`, which is the same as `python -m hydraloop`."""
    platforms.check()
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
        _train()


if __name__ == "__main__":
    main()

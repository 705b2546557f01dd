"""`python -m hydraloop …`: train with conf/ of the working directory, or a command for runs; --help lists them."""

import sys
from pathlib import Path

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
        print(f"error: there is no folder conf here, so nothing can be trained\n{usage}", file=sys.stderr)
        sys.exit(2)
    from hydraloop.app import main

    main(folder=Path.cwd())


if __name__ == "__main__":
    name = next(iter(sys.argv[1:]), "")
    if name in COMMANDS and not sys.flags.safe_path:
        del sys.path[0]  # the working directory, from which nothing is imported until it is trusted
    if name == "resume":
        _resume()
    elif name in COMMANDS:
        from hydraloop.commands.dispatch import run

        sys.exit(run(sys.argv[1:]))
    else:
        _train()

"""`python -m hydraloop …`: train with conf/ of the working directory, or a command for runs; --help lists them."""

import sys

if sys.argv[1:2] == ["sync"]:
    from hydraloop.tracking.sync import main as sync

    sys.exit(sync(sys.argv[2:]))

if sys.argv[1:2] == ["diff"]:
    from hydraloop.cli.console import end_with_reader
    from hydraloop.cli.diff import main as diff

    end_with_reader()
    sys.exit(diff(sys.argv[2:]))

if sys.argv[1:2] and sys.argv[1] in ("evaluate", "predict", "export", "replay", "resume") and not sys.flags.safe_path:
    del sys.path[0]  # the working directory, from which nothing is imported until it is trusted

if sys.argv[1:2] and sys.argv[1] in ("status", "attach", "logs", "results", "stop"):
    from hydraloop.sweeps.commands import main as sweeps

    sys.exit(sweeps(sys.argv[1:]))

if sys.argv[1:2] and sys.argv[1] in ("evaluate", "predict", "export", "replay"):
    from hydraloop.after_training import main as after_training

    sys.exit(after_training(sys.argv[1:]))

if sys.argv[1:2] == ["resume"]:
    from hydraloop.app import main
    from hydraloop.cli.resume_command import trusted

    folder, packages, sys.argv[1:] = trusted(sys.argv[1:])
    main(folder=folder, trusted=packages)
    sys.exit()

from pathlib import Path

if not Path("conf").is_dir() and not any(text.startswith(("--config-path", "-cp")) for text in sys.argv[1:]):
    from hydraloop.cli.help import COMMANDS

    usage = f"""{COMMANDS}
  python -m hydraloop [key=value …]    train with the folder conf here; --help lists the options"""
    asked = bool({"-h", "--help"}.intersection(sys.argv))
    print(
        usage if asked else f"error: there is no folder conf here, so nothing can be trained\n{usage}",
        file=sys.stdout if asked else sys.stderr,
    )
    sys.exit(0 if asked else 2)

from hydraloop.app import main

main(folder=Path.cwd())

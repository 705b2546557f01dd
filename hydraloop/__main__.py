"""`python -m hydraloop …`: train with conf/ of the working directory, or a command for runs.

`resume …` continues a run; `evaluate …`, `predict …` and `export …` use a finished run; `replay …` rebuilds a run at an
iteration; `diff …` compares two runs;
`status …`, `attach …`, `logs …`, `results …` and `stop …` look at a sweep or a run, or end it;
`sync …` sends trackers what they do not have.
"""

import sys
from pathlib import Path

if sys.argv[1:2] == ["sync"]:
    from hydraloop.tracking.sync import main as sync

    sys.exit(sync(sys.argv[2:]))

if sys.argv[1:2] == ["diff"]:
    from hydraloop.cli.diff import main as diff

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

if not Path("conf").is_dir() and not any(text.startswith(("--config-path", "-cp")) for text in sys.argv[1:]):
    usage = """python -m hydraloop resume <run>     continue a run with its saved config
python -m hydraloop evaluate <run>   print the metrics of a finished run; --help lists the arguments
python -m hydraloop predict <run>    write its predictions
python -m hydraloop export <run>     write its model
python -m hydraloop replay <run> iteration=<n>
                                     rebuild it at an iteration, and compare it with its records
python -m hydraloop diff <run> <run> print what differs between two runs
python -m hydraloop status <folder>  print how a sweep or a run is doing
python -m hydraloop attach <folder>  show it until it ends
python -m hydraloop results <sweep>  print its results, and write results.csv and results.json
python -m hydraloop logs <folder> [job]
                                     print what a job, a run or a controller has printed; -f follows it
python -m hydraloop stop <folder>    let it save and end, and end all of its processes
python -m hydraloop sync <folder>    send trackers the records that they do not have
python -m hydraloop [key=value …]    train with the folder conf here; --help lists the options"""
    asked = bool({"-h", "--help"}.intersection(sys.argv))
    print(
        usage if asked else f"error: there is no folder conf here, so nothing can be trained\n{usage}",
        file=sys.stdout if asked else sys.stderr,
    )
    sys.exit(0 if asked else 2)

from hydraloop.app import main

main(folder=Path.cwd())

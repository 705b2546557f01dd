"""`hydraloop …` or `python -m hydraloop …`: the commands, without the code of a project."""

import sys

from hydraloop.importing import deferred, in_one_line

with deferred():
    from hydraloop.commands import dispatch, parser
    from hydraloop.files.terminal import replace_unencodable


def main() -> None:
    """The command `hydraloop`, which is the same as `python -m hydraloop`."""
    with in_one_line():
        replace_unencodable()
        name = next(iter(sys.argv[1:]), "")
        if name in parser.COMMANDS and name not in parser.OF_PROJECTS and not {"-h", "--help"}.intersection(sys.argv):
            sys.exit(dispatch.run(sys.argv[1:]))
        from hydraloop.commands.command_line import without_project  # 150 ms

        without_project()


if __name__ == "__main__":
    main()

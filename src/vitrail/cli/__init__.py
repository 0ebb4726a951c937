"""The command line, one file per command."""


def main() -> None:
    """Runs the program."""
    from vitrail.cli.program import main

    main()

"""The command line, one file per command."""


def main() -> None:
    """Entry point of the ``vitrail`` command."""
    from vitrail.cli.program import main

    main()

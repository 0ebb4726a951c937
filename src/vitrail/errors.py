"""The one exception family of vitrail."""


class VitrailError(Exception):
    """Something the user can fix: the message says what was given, what was expected and what to do."""

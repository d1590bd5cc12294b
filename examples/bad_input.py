"""The one error that the examples report without a traceback."""


class BadInput(Exception):
    """What the user gave cannot be used; the message names the rule, the value found, and what to do."""

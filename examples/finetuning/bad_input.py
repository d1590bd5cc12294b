"""The one error that the examples report without a traceback."""


class BadInput(Exception):
    """What the user gave cannot be used; the message names the rule, the value found, and what to do."""


def first_line(error: Exception) -> str:
    """First line of what an error of another library says, or its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]

"""Errors of the processes that load images, as one line each."""

from .bad_input import first_line


def death_of_worker(error: BaseException | None) -> str | None:
    """What torch says of a DataLoader's process that died, or None for any other error.

    Torch raises it wherever the main process happens to be; the error's cause, where it has one, names the signal.
    """
    if not isinstance(error, RuntimeError) or not str(error).startswith("DataLoader worker (pid"):
        return None
    return death_of_worker(error.__cause__) or first_line(error)


def first_cause(error: Exception) -> str:
    """The message of an error; where a worker raised it, torch wraps it in that worker's traceback, whose end it is."""
    text = str(error).strip()
    if not text.startswith("Caught "):
        return text
    return text.splitlines()[-1].partition(": ")[2]

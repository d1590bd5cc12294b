"""Kill -9 of forked children at a chosen moment of their work, measured in their CPU time: load does not move it."""

import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path

FORK = multiprocessing.get_context("fork")  # a forked child needs no imports, so every kill lands in its work


def seconds_of(process):
    """CPU time of a child that is run to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process.join()
    assert process.exitcode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def killed_after(process, seconds):
    """Kill a child once it has used so much CPU time; False when it was done before."""
    while process.is_alive() and _used(process) < seconds:
        time.sleep(0.005)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def _used(process):
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

"""The rule by which one of several processes decides, with its exit status, why their job ended.

Peers of a process that failed end after it, with other statuses: they save (75), give up to be started again (76), or
are aborted (134, as JAX's coordination service does it). So the first failure counts, as in the supervisor. The batch
script of Slurm has the same rule in bash (slurm_script.py); a test compares both.
"""

from collections.abc import Iterable

from jaxtrain.distributed import exit_codes

ABORTED = 134  # SIGABRT, as a shell tells it


def of_job(statuses: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the process and the exit status that decide what happens to a job; None: all processes are done.

    Args:
        statuses: each process with its exit status, in the order in which they ended.
    """
    final = crash = again = saved = None
    for process, status in statuses:
        if status in exit_codes.FINAL and status != exit_codes.DONE:
            final = final or (process, status)  # also after a crash: a process that is told to end needs longer for it
        elif status == exit_codes.SAVED:
            saved = saved or (process, status)
        elif status == exit_codes.RESTART or (status == ABORTED and (again or saved)):
            again = again or (process, exit_codes.RESTART)
        elif status != exit_codes.DONE:
            crash = crash or (process, status)
    return final or crash or again or saved

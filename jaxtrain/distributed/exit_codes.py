"""The exit statuses of runs, which tell a supervisor, Slurm, Kubernetes or a person what to do next."""

import signal

from jaxtrain.base.exit_statuses import DONE, INTERRUPTED, MISTAKE, RESTART, SAVED, STOPPED

FINAL = (DONE, MISTAKE, STOPPED, INTERRUPTED)  # not to be restarted automatically
_WORDS = {
    DONE: "reached the last step",
    MISTAKE: "ended with a user error",
    SAVED: "saved and stopped, as SIGTERM asked",
    RESTART: "gave up, to be started again",
    STOPPED: "stopped at a limit",
    INTERRUPTED: "was stopped by Ctrl-C",
}


class RunExit(Exception):
    """Raised to end the run deliberately, with a sentence for people and a status for launchers."""

    alone = False  # whether it is raised in one process only, and the others do not know of it yet

    def __init__(self, code: int, sentence: str):
        self.code = code
        super().__init__(sentence)


def words(code: int) -> str:
    """Return what an exit status means; negative ones (as in `subprocess`) and those above 128 (shells) are signals."""
    number = -code if code < 0 else code - 128
    if code not in _WORDS and 0 < number < 65:
        try:
            return f"was killed by {signal.Signals(number).name}"
        except ValueError:
            return f"was killed by signal {number}"
    return f"{_WORDS.get(code, 'crashed')} (exit status {code})"

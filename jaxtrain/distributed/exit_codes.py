"""Exit statuses, which tell a supervisor, Slurm, Kubernetes or a person what to do next."""

import signal

DONE = 0  # the last step was reached, or the run stopped early by train.patience
MISTAKE = 2  # a user error, which a restart would repeat
SAVED = 75  # asked to stop by SIGTERM, and saved: restart (EX_TEMPFAIL of sysexits.h; Slurm's RequeueExit=75)
RESTART = 76  # ended deliberately (hang, lost peer, rollback): restart
STOPPED = 77  # a limit was reached: a person must look, since a restart would only repeat it
INTERRUPTED = 130  # Ctrl-C; saved unless it came twice

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

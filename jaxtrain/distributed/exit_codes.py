"""Exit statuses: what whoever started the process is to do next, be it a supervisor, Slurm, Kubernetes or a person."""

import signal

DONE = 0  # the last step was reached
MISTAKE = 2  # the user's; it would be made again
SAVED = 75  # asked to stop by SIGTERM, and saved: start again (EX_TEMPFAIL of sysexits.h; Slurm's RequeueExit=75)
RESTART = 76  # given up on purpose (hang, lost peer, rollback): start again
STOPPED = 77  # a limit was reached: a person must look, and starting again would only repeat it
INTERRUPTED = 130  # Ctrl-C; saved unless it came twice

FINAL = (DONE, MISTAKE, STOPPED, INTERRUPTED)  # starting again is not for machines to decide
_WORDS = {
    DONE: "reached the last step",
    MISTAKE: "refused what it was given",
    SAVED: "saved and stopped, as SIGTERM asked",
    RESTART: "gave up, to be started again",
    STOPPED: "stopped at a limit",
    INTERRUPTED: "was stopped by Ctrl-C",
}


class RunExit(Exception):
    """The run ends here, on purpose, with a sentence for people and a status for launchers."""

    def __init__(self, code: int, sentence: str):
        self.code = code
        super().__init__(sentence)


def words(code: int) -> str:
    """What a status says, as `subprocess` has it: below zero it is a signal. (Shells have 128 + the signal.)"""
    number = -code if code < 0 else code - 128
    if code not in _WORDS and 0 < number < 65:
        try:
            return f"was killed by {signal.Signals(number).name}"
        except ValueError:
            return f"was killed by signal {number}"
    return f"{_WORDS.get(code, 'crashed')} (exit status {code})"

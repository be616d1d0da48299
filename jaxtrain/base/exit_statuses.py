"""The exit statuses of all commands: what each means, and what a person or a launcher does then.

The tables of docs/operations.md are made of these (`tests/base/test_exit_statuses.py`).
"""

DONE = 0
NO = 1  # the command did its work, and the answer is no; Python's own status of a crash, too
MISTAKE = 2  # a user error, which a restart would repeat
SAVED = 75  # asked to stop by SIGTERM, and saved: restart (EX_TEMPFAIL of sysexits.h; Slurm's RequeueExit=75)
RESTART = 76  # ended deliberately (hang, lost peer, rollback): restart
STOPPED = 77  # a limit was reached: a person must look, since a restart would only repeat it
INTERRUPTED = 130  # Ctrl-C; saved unless it came twice
TERMINATED = 143  # SIGTERM before there was anything to save

# Each status with its meaning and what to do, for all commands; those from 75 on are of runs.
MEANINGS = {
    DONE: ("the command did what it was asked to; a run reached its last step, or [stopped early](training.md#early-"
           "stopping) by `train.patience`", "nothing"),
    NO: ("the answer is no (see below), or a crash with a traceback", "read what was printed; of a run with a "
         "supervisor, its last lines name the process that failed first, otherwise read the log of each process"),
    MISTAKE: ("the command or config was refused: one line on stderr names the key, the reason and the fix",
              "fix it; the same command would be refused again"),
    SAVED: ("the process received SIGTERM and saved a checkpoint", "start it again (Slurm: `RequeueExit=75`)"),
    RESTART: ("the run stopped itself: a hang, a lost process, a device that computes wrong results, another run in "
              "the same workdir, a last checkpoint that could not be saved",
              "start it again; stderr says which process or device"),
    STOPPED: ("a limit was reached: anomalies, the same device wrong twice, a crash that repeats",
              "read the message and decide; the same command would end the same way"),
    INTERRUPTED: ("Ctrl-C; a run saved, unless it was pressed twice", "nothing"),
    TERMINATED: ("SIGTERM arrived while the process was starting, before there was anything to save", "start it again"),
}
# The commands that can end with NO, and when.
NOES = {
    "bench": "it ran out of memory, or all runs of a sweep failed",
    "bisect": "the two sides part, and rounding does not explain it",
    "checkpoint": "`verify` found damage",
    "coordinates": "activations grow with width",
    "doctor": "a check FAILs",
    "export": "with `--gates`, the model does not pass",
    "plan": "nothing fits",
    "prove": "the numbers differ from those of one device",
    "runs": "`gc --delete` could not delete some files; `reproduce` found differences",
}


def tables() -> str:
    """Return both tables in Markdown."""
    rows = [f"| {code} | {meaning} | {then} |" for code, (meaning, then) in MEANINGS.items()]
    noes = [f"| `{name}` | {when} |" for name, when in NOES.items()]
    return "\n".join(["| exit status | meaning | what to do |", "|---|---|---|", *rows, "",
                      f"A command that looks for something ends with {NO} when it finds that:", "",
                      "| command | ends with 1 when |", "|---|---|", *noes])

"""The coordinator's command, killed in some of its compactions: python -m tests.diloco.crashing_coordinator serve ...

Of its calls to the file system that keep a snapshot and drop what that makes needless, each may be the last.
"""

import os
import random
import signal
import sys
import threading

from jaxtrain.commands.diloco import main
from jaxtrain.diloco.outer_log import OuterLog

CALLS = "open", "fsync", "replace", "unlink"
SHARE = 0.02  # of the calls, before and after each
_rng = random.Random()  # different after each restart
_within = threading.local()


def may_crash(call):
    def done(*given, **keys):
        die()
        found = call(*given, **keys)
        die()
        return found
    return done


def die():
    if getattr(_within, "it", False) and _rng.random() < SHARE:
        os.kill(os.getpid(), signal.SIGKILL)


def killed_in(method):
    def called(*given):
        before, _within.it = getattr(_within, "it", False), True
        try:
            return method(*given)
        finally:
            _within.it = before
    return called


if __name__ == "__main__":
    for name in CALLS:
        setattr(os, name, may_crash(getattr(os, name)))
    for name in ("claim_snapshot", "_compact"):
        setattr(OuterLog, name, killed_in(getattr(OuterLog, name)))
    sys.exit(main(sys.argv[1:]))

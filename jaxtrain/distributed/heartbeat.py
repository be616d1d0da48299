"""The thread between a training process and its supervisor: I am alive, and if you are not, neither shall I be.

A socket, not a file: it works with a full disk or a storage server that hangs, and the kernel closes it with the
supervisor, however that ended. A process that is stopped, or whose interpreter is stuck, does not beat.
"""

import os
import select
import signal
import socket
import threading

VARIABLE = "JAXTRAIN_LIFELINE"  # the number of the open socket
_PERIOD = 1.0  # seconds


def hold() -> None:
    """Begin to beat, if a supervisor started this process."""
    number = os.environ.pop(VARIABLE, None)  # it is ours alone, not our children's
    if number is not None:
        threading.Thread(target=_beat, args=(socket.socket(fileno=int(number)),), name="lifeline", daemon=True).start()


def _beat(line: socket.socket) -> None:
    while True:
        try:
            line.send(b".", socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # the supervisor is stopped: no reason to stop too
        except OSError:
            break
        if select.select([line], [], [], _PERIOD)[0]:  # nothing is ever said to us: this is the end of it
            break
    os.kill(os.getpid(), signal.SIGKILL)  # peers may hang in a collective, where nothing gentler is heard

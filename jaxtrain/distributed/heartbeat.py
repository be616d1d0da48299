"""The heartbeat from a training process to its supervisor; the process ends if the supervisor does.

It uses a socket, not a file: that works with a full disk or a hanging storage server, and the kernel closes it when the
supervisor ends, for whatever reason. A process that is stopped, or whose interpreter is stuck, sends no heartbeats.
"""

import os
import select
import signal
import socket
import threading

VARIABLE = "JAXTRAIN_LIFELINE"  # holds the file descriptor of the open socket
_PERIOD = 1.0  # seconds


def hold() -> None:
    """Start sending heartbeats, if a supervisor started this process."""
    number = os.environ.pop(VARIABLE, None)  # not to be inherited by our own children
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
        if select.select([line], [], [], _PERIOD)[0]:  # nothing is ever sent to us, so the connection ended
            break
    os.kill(os.getpid(), signal.SIGKILL)  # peers may hang in a collective, where gentler signals are not handled

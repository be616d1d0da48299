"""A process in which environments of one kind run, so that none can stop or fill the one that trains.

It takes requests from its standard input, a socket, as JSON behind the length in eight bytes, and answers each in the
same form; what an environment prints goes nowhere. The first request is what to load. A conversation that it does not
know is played again from its beginning. It ends, with all processes that an environment started, when the socket is
closed, whatever the environment does meanwhile.
"""

import contextlib
import json
import os
import queue
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.base.sockets import read_exactly
from jaxtrain.tuning.environments.loading import load
from jaxtrain.tuning.environments.protocol import LONGEST, MESSAGE

REASON = 300  # characters of an error


def main() -> None:
    """Answer requests until there are no more."""
    line = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # a tool that reads its input does not read requests
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(line, asked), daemon=True).start()
    setup = json.loads(asked.get())
    answer = _Player(setup["limit"])
    line.sendall(framed(answer.load(setup)))
    while True:
        if (reply := answer(json.loads(asked.get()))) is not None:
            line.sendall(reply)


def framed(content: Json) -> bytes:
    """Return JSON behind its length."""
    written = json.dumps(content).encode()
    if len(written) > MESSAGE:
        written = json.dumps({"error": f"makes {len(written):,} bytes of JSON, and {MESSAGE:,} are the most"}).encode()
    return len(written).to_bytes(8, "big") + written


def _listen(line: socket.socket, asked: "queue.SimpleQueue[bytes]") -> None:
    """Take requests as they come; end the process, and those that it started, once there can be no more."""
    with contextlib.suppress(OSError):
        while (size := read_exactly(line, 8)) and (content := read_exactly(line, int.from_bytes(size, "big"))):
            asked.put(content)
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


class _Player:
    """The conversations of this process."""

    def __init__(self, limit: int):
        """`limit`: bytes of address space; 0: as much as there is."""
        self._made: Callable[[], Any] = dict
        self._live: dict[str, tuple[Any, int]] = {}  # by id: the environment, and how many answers it had
        for what, size in ((resource.RLIMIT_AS, limit), (resource.RLIMIT_CORE, 0)):
            with contextlib.suppress(OSError, ValueError):  # macOS has no bound of the first kind
                if size or what != resource.RLIMIT_AS:
                    resource.setrlimit(what, (size, size))

    def load(self, setup: JsonObject) -> JsonObject:
        """Load the environment; return its tasks, or why it cannot be loaded."""
        try:
            self._made = load(setup["name"], setup["options"])
            tasks = getattr(self._made, "tasks", None)
            return {"tasks": list(tasks() if callable(tasks) else tasks or ()) if setup["tasks"] else []}
        except BaseException as error:
            return {"error": _reason(error), "refused": getattr(error, "reason", ""), "fix": getattr(error, "fix", "")}

    def __call__(self, request: JsonObject) -> bytes | None:
        """Return the next turn of a conversation, or why there is none."""
        if "release" in request:
            for id in request["release"]:
                self._close(id)
            return None
        try:
            found = self._turn(request)
            answer = framed(found)
        except MemoryError:
            self._live.clear()
            answer = framed(found := {"error": "takes more memory than rl.environment_memory_gib allows"})
        except BaseException as error:  # SystemExit too: it is the environment's, not ours
            answer = framed(found := {"error": f"fails ({_reason(error)})"})
        if found.get("done") or "error" in found:
            self._close(request["id"])
        return answer

    def _turn(self, request: JsonObject) -> JsonObject:
        id, answers = request["id"], request["answers"]
        one, known = self._live.get(id, (None, -1))
        found: JsonObject = {}
        if one is None or known != len(answers) - 1:
            self._close(id)
            one, known = self._made(), 0
            self._live[id] = one, -2  # it is closed, and never continued, if this fails
            found = {"observation": one.reset(request["record"], request["seed"]), "tools": getattr(one, "tools", None)}
        for answer in answers[known:]:
            if found.get("done"):
                return {"error": "ends at another turn when a conversation is played again: let all that it does "
                                 "depend on the record, the seed and the answers"}
            found = _stepped(one.step(answer))
        if isinstance(said := found["observation"], str) and len(said) > LONGEST:
            return {"error": f"says {len(said):,} characters, and {LONGEST:,} are the most"}
        self._live[id] = one, len(answers)
        return found

    def _close(self, id: str) -> None:
        one, _ = self._live.pop(id, (None, 0))
        if one is not None and callable(close := getattr(one, "close", None)):
            with contextlib.suppress(Exception):
                close()


def _stepped(found: object) -> JsonObject:
    """Return what a step gives, as JSON."""
    if not isinstance(found, tuple) or len(found) != 3:
        raise TypeError(f"step gives {type(found).__name__}, not a tuple of observation, reward and done")
    said, reward, done = found
    return {"observation": said, "reward": float(reward), "done": bool(done)}


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:REASON]


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    main()

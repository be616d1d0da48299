"""The process that renders chat templates, which are programs of strangers: it has little memory and little time.

It takes requests from its standard input, a socket, as JSON behind the length in four bytes, and answers each in the
same form. It imports jinja2 and the standard library only, writes no files, and ends when the socket is closed. A
request that takes too much processor time ends it, by the default action of the timer's signal.
"""

import contextlib
import functools
import json
import os
import resource
import signal
import socket
import sys
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.base.sockets import read_exactly
from jaxtrain.data.chat.sandbox import Sandbox
from jaxtrain.data.chat.template_limits import CALLS, EACH_S, LONGEST, MEMORY, MESSAGE, REASON, SOURCE


def main() -> None:
    """Answer requests until there are no more."""
    sys.setrecursionlimit(CALLS)
    for what, limit in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(OSError, ValueError):  # macOS has no bound of the first kind
            resource.setrlimit(what, (limit, limit))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with socket.socket(fileno=os.dup(0)) as line:
        while (size := read_exactly(line, 4)) and (request := read_exactly(line, int.from_bytes(size, "big"))):
            content = _answered(request)
            line.sendall(len(content).to_bytes(4, "big") + content)


def _answered(request: bytes) -> bytes:
    try:
        return _as_bytes(answer(json.loads(request.decode(errors="surrogatepass"))))
    except MemoryError:
        return _as_bytes({"limit": "memory"})
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def answer(request: JsonObject) -> JsonObject:
    """Return the texts of conversations, or why there are none.

    A request has the `source` of a template, its `variables`, the `seconds` of processor time that a conversation may
    take, and `conversations`: each has `messages`, `tools`, and for each of its `texts` the number of messages and
    whether to add the prompt of an answer. The answer is `invalid`, why the source is not a template; a `limit`,
    "memory" or "depth"; or `conversations`: see `_rendered`.
    """
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    try:
        template = _compiled(request["source"])
    except TemplateSyntaxError as error:
        return {"invalid": f"line {error.lineno}: {error}"[:REASON]}
    except RecursionError:
        return {"limit": "depth"}
    except Exception as error:  # jinja2 makes Python of it, which has limits of its own
        return {"invalid": f"{type(error).__name__}: {error}"[:REASON]}
    return {"conversations": [_rendered(template, one, request) for one in request["conversations"]]}


def _rendered(template: Any, one: JsonObject, request: JsonObject) -> JsonObject:
    """Return the `texts` of a conversation, the `error` of a template that does not take it, or a `limit`.

    The first text is whole. Of each other one there is how many characters both begin with, and the rest.
    """
    signal.setitimer(signal.ITIMER_PROF, request["seconds"] + EACH_S * len(one["texts"]))
    texts: list[Any] = []
    try:
        for count, prompted in one["texts"]:
            text = _text(template, request["variables"], one["messages"][:count], one["tools"], prompted)
            texts.append(_beyond(texts[0], text) if texts else text)
    except MemoryError:
        return {"limit": "memory"}
    except RecursionError:
        return {"error": f"it is nested deeper than {CALLS:,} calls"}
    except Exception as error:  # a record can be unexpected in any way
        return {"error": f"{type(error).__name__}: {error}"[:REASON]}
    return {"texts": texts}


@functools.lru_cache(16)
def _compiled(source: str) -> Any:
    if len(source) > SOURCE:
        raise ValueError(f"it has more than {SOURCE:,} characters")
    return Sandbox().compiled(source)


def _text(template: Any, variables: JsonObject, messages: list[Json], tools: Json, prompted: bool) -> str:
    template.environment.used = 0
    text = template.render(messages=messages, tools=tools, documents=None, add_generation_prompt=prompted, **variables)
    if len(text) > LONGEST:
        raise TemplateError(f"it makes more than {LONGEST:,} characters")
    return text


def _beyond(first: str, text: str) -> tuple[int, str]:
    """Return how many characters two texts begin with, and the rest of the second one."""
    least, most = 0, min(len(first), len(text))
    if first.startswith(text[:most]):
        return most, text[most:]
    while least < most:
        middle = (least + most + 1) // 2
        if first.startswith(text[least:middle], least):
            least = middle
        else:
            most = middle - 1
    return least, text[least:]


def _as_bytes(value: JsonObject) -> bytes:
    content = json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")
    return content if len(content) < MESSAGE else b'{"limit": "memory"}'


if __name__ == "__main__":
    main()

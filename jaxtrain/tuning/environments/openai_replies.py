"""An answer of the model in the form of OpenAI's chat completions."""

import json

from jaxtrain.base.annotations import JsonObject

_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}  # the run counts tokens, and no program here


def completion(message: JsonObject) -> JsonObject:
    """Return a message as a response."""
    return {"id": "answer", "object": "chat.completion", "created": 0, "model": "policy", "usage": _USAGE,
            "choices": [{"index": 0, "message": message, "finish_reason": _reason(message)}]}


def streamed(message: JsonObject) -> bytes:
    """Return a message as a response that is streamed, in one piece."""
    calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
    delta = message | ({"tool_calls": calls} if calls else {})
    parts = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
             {"choices": [{"index": 0, "delta": {}, "finish_reason": _reason(message)}]},
             {"choices": [], "usage": _USAGE}]
    head = {"id": "answer", "object": "chat.completion.chunk", "created": 0, "model": "policy"}
    return b"".join(b"data: " + json.dumps(head | part).encode() + b"\n\n" for part in parts) + b"data: [DONE]\n\n"


def _reason(message: JsonObject) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"

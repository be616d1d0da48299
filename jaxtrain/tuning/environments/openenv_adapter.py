"""Environments of OpenEnv: of a server by its URL, or of a class on this machine, in the worker's own process.

The model writes an action as a JSON object. Where an action has one text only, any other answer is that text.
"""

import importlib
import inspect
import json
import urllib.request
from typing import TYPE_CHECKING, get_type_hints

from jaxtrain.base.annotations import JsonObject
from jaxtrain.errors import UserError, install_extra
from jaxtrain.tuning.environments.protocol import KEY, Made

if TYPE_CHECKING:
    from openenv import GenericEnvClient

_NOT_SAID = ("metadata", "done", "reward")  # fields of an observation that the model is not told


def adapted(named: str) -> Made:
    """Return what makes a conversation with an environment: http://HOST:PORT, or MODULE:CLASS."""
    try:
        from openenv import GenericEnvClient  # before the first conversation: it takes seconds
    except ImportError as error:
        raise UserError(KEY, "openenv:NAME needs the package openenv", install_extra("environments")) from error
    if "://" in named:
        with urllib.request.urlopen(f"{named.rstrip('/')}/schema", timeout=30) as response:
            action = json.loads(response.read(2**20))["action"]
        return lambda: Remote(GenericEnvClient(base_url=named), action)
    module, _, name = named.partition(":")
    if not name:
        raise UserError(KEY, f"openenv:{named} is neither a URL nor a class", "write openenv:http://HOST:PORT or "
                        "openenv:MODULE:CLASS")
    kind = getattr(importlib.import_module(module), name)
    return lambda: Local(kind)


class Local:
    """A conversation with an environment in this process."""

    def __init__(self, kind: type):
        self._environment = kind()
        self._action = get_type_hints(kind.step)["action"]

    def reset(self, record: JsonObject, seed: int) -> str:
        """Begin, by what the record has under "reset"."""
        wanted, takes = {"seed": seed, **record.get("reset", {})}, inspect.signature(self._environment.reset).parameters
        if not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
            wanted = {name: value for name, value in wanted.items() if name in takes}
        return said(self._environment.reset(**wanted).model_dump())

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Take the action that an answer is."""
        action = self._action.model_validate(action_of(answer, self._action.model_json_schema()))
        found = self._environment.step(action)
        return said(found.model_dump()), float(found.reward or 0), found.done

    def close(self) -> None:
        """Release what the environment holds."""
        self._environment.close()


class Remote:
    """A conversation with an environment behind a URL, in a session of its own."""

    def __init__(self, client: "GenericEnvClient", action: JsonObject):
        self._schema, self._client = action, client.sync()
        self._client.connect()

    def reset(self, record: JsonObject, seed: int) -> str:
        """Begin, by what the record has under "reset"."""
        return said(self._client.reset(seed=seed, **record.get("reset", {})).observation)

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Take the action that an answer is."""
        found = self._client.step(action_of(answer, self._schema))
        return said(found.observation), float(found.reward or 0), bool(found.done)

    def close(self) -> None:
        """End the session."""
        self._client.close()


def action_of(answer: str, schema: JsonObject) -> JsonObject:
    """Return the action that an answer is: a JSON object, or the one text that an action has."""
    try:
        if isinstance(found := json.loads(answer), dict):
            return found
    except (ValueError, RecursionError):
        pass
    texts = [name for name, field in schema.get("properties", {}).items() if field.get("type") == "string"]
    return {min(texts, key=lambda name: name not in schema.get("required", ())): answer} if texts else {}


def said(observation: JsonObject) -> str:
    """Return an observation as text: the one text that it has, or JSON."""
    told = {name: value for name, value in observation.items() if name not in _NOT_SAID}
    if len(told) == 1 and isinstance(only := next(iter(told.values())), str) and only:
        return only
    return json.dumps(told, ensure_ascii=False, default=str)

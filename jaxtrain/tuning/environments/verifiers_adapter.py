"""Environments of verifiers, which ask for the model as for a server of OpenAI's protocol.

Each worker has such a server. A question of an environment, which it asks while an episode of it runs, is what is said
to the model, and the answer to the question is what the model said. A package's environment is named by its id, or a
TOML file has the table "env" as verifiers has it, with options, agents and harnesses.
"""

import asyncio
import json
import queue
import re
import secrets
import threading
import tomllib
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.base.annotations import JsonObject
from jaxtrain.errors import UserError, install_extra
from jaxtrain.tuning.environments.openai_replies import completion, streamed
from jaxtrain.tuning.environments.protocol import KEY, Made

if TYPE_CHECKING:
    import verifiers.v1 as vf
    from aiohttp import web

MOST_TASKS = 10_000  # of an environment that has them without end
_PATIENCE_S = 100.0  # to set up


def adapted(named: str) -> Made:
    """Return what makes a conversation with an environment: the id of a package, or FILE.toml."""
    try:
        import verifiers.v1  # noqa: F401
    except ImportError as error:
        raise UserError(KEY, "verifiers:NAME needs the package verifiers 0.4 or later",
                        install_extra("environments")) from error
    config = {"taskset": {"id": named}}
    if named.endswith(".toml"):
        try:
            config = tomllib.loads(Path(named).read_text())["env"]
        except (OSError, ValueError, KeyError) as error:
            raise UserError(KEY, f"{named} has no table env of verifiers ({error})", "write [env.taskset]") from error
    return Episodes(config)


class Episodes:
    """An environment of verifiers, whose episodes run on a thread of their own."""

    def __init__(self, config: JsonObject):
        import verifiers.v1 as vf

        from jaxtrain.tuning.environments import verifiers_chat

        verifiers_chat.register()
        typed = vf.env_config_type(config["taskset"]["id"], config.get("id", ""))
        for name, field in typed.model_fields.items():  # in this process, unless the file says otherwise
            if isinstance(field.default, vf.AgentConfig):
                config[name] = {"runtime": {"type": "subprocess"}, "harness": {"id": verifiers_chat.ID},
                                **config.get(name, {})}
        self._environment = vf.load_environment(vf.resolve_env_config(config))
        self._tasks = list(islice(self._environment.taskset, MOST_TASKS))
        self._talks: dict[str, _Conversation] = {}
        self._loop = asyncio.new_event_loop()
        ready: Future[int] = Future()
        threading.Thread(target=self._run, args=(ready,), daemon=True).start()
        self._port = ready.result(_PATIENCE_S)

    def tasks(self) -> list[JsonObject]:
        """Return the tasks of the environment, by their numbers."""
        return [{"task": number} for number in range(len(self._tasks))]

    def __call__(self) -> "_Conversation":
        """Return a conversation."""
        return _Conversation(self)

    def begin(self, talk: "_Conversation", number: int) -> Future:
        """Begin an episode about the task of this number."""
        import verifiers.v1 as vf

        self._talks[talk.name] = talk
        client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{self._port}/{talk.name}/v1", api_key_var="NO_KEY")
        context = vf.ModelContext(model="policy", client=client)
        return asyncio.run_coroutine_threadsafe(
            self._environment.run_episode(self._tasks[number % len(self._tasks)], context), self._loop)

    def drop(self, talk: "_Conversation") -> None:
        """Forget a conversation."""
        self._talks.pop(talk.name, None)

    def _run(self, ready: Future) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve(ready))

    async def _serve(self, ready: Future) -> None:
        """Serve the model to episodes, for as long as the process runs."""
        from aiohttp import web

        try:
            app = web.Application(client_max_size=2**26)
            app.router.add_post("/{name}/v1/chat/completions", self._asked)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            async with self._environment.serving():
                ready.set_result(runner.addresses[0][1])
                await asyncio.Event().wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    async def _asked(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        body, talk = await request.json(), self._talks.get(request.match_info["name"])
        if talk is None:
            raise web.HTTPGone
        message = await talk.ask(body)
        if body.get("stream"):
            return web.Response(body=streamed(message), content_type="text/event-stream")
        return web.json_response(completion(message))


class _Conversation:
    """One episode, as a conversation with the model."""

    def __init__(self, episodes: Episodes):
        self._episodes, self.name = episodes, secrets.token_hex(16)  # no other program knows it
        self._heard: queue.SimpleQueue[JsonObject | None] = queue.SimpleQueue()  # questions; None: the episode's end
        self._answer: asyncio.Future | None = None
        self._known = 0  # messages that the model has been told, or said
        self.tools: list[JsonObject] | None = None

    def reset(self, record: JsonObject, seed: int) -> list[JsonObject]:
        """Begin an episode; return what the model is told first."""
        self._episode = self._episodes.begin(self, record.get("task", seed))
        self._episode.add_done_callback(lambda _: self._heard.put(None))
        found, _, done = self._next()
        if done:
            raise RuntimeError(f"the episode ends before the model is asked{_why(self._episode.result())}")
        return found

    def step(self, answer: str) -> tuple[list[JsonObject], float, bool]:
        """Return what is said to an answer."""
        assert self._answer
        self._episodes._loop.call_soon_threadsafe(self._answer.set_result, message_of(answer))
        return self._next()

    def close(self) -> None:
        """End the episode, if it goes on."""
        self._episodes.drop(self)
        self._episode.cancel()

    async def ask(self, body: JsonObject) -> JsonObject:
        """Return the model's answer to a question; the episode waits for it."""
        self._answer = asyncio.get_running_loop().create_future()
        self._heard.put(body)
        return await self._answer

    def _next(self) -> tuple[list[JsonObject], float, bool]:
        """Wait for a question or the episode's end."""
        if (body := self._heard.get()) is None:
            episode = self._episode.result()
            if not episode.ok:
                raise RuntimeError(f"the episode fails{_why(episode)}")
            return [], float(sum(trace.reward for trace in episode.traces)), True
        messages = body["messages"]
        if len(messages) <= self._known or any(one.get("role") == "assistant" for one in messages[self._known:]):
            raise RuntimeError("the environment changes what was said before")
        found, self._known = [_plain(one) for one in messages[self._known:]], len(messages) + 1
        self.tools = body.get("tools") or self.tools
        return found, 0.0, False


def _why(episode: "vf.Episode") -> str:
    """Return what went wrong in an episode, as the end of a sentence."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return f" ({errors[0].type}: {errors[0].message})" if errors else ""


def _plain(message: JsonObject) -> JsonObject:
    """Return a message whose content is text."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part.get("text", "") for part in content)
    return {key: value for key, value in message.items() if key in ("role", "name", "tool_call_id")} | {
        "content": content}


_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def message_of(answer: str) -> JsonObject:
    """Return an answer as a message, with the calls of tools that it spells as Hermes and Qwen do."""
    calls = []
    for number, text in enumerate(_CALL.findall(answer)):
        try:
            found = json.loads(text)
            calls.append({"id": f"call_{number}", "type": "function", "function": {
                "name": f"{found['name']}", "arguments": json.dumps(found.get("arguments", {}))}})
        except (ValueError, TypeError, KeyError, RecursionError):
            continue  # it stays text
    message: JsonObject = {"role": "assistant", "content": _CALL.sub("", answer).strip() if calls else answer}
    return message | ({"tool_calls": calls} if calls else {})

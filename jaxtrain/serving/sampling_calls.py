"""Samplers of a training service: the requests that they take, and the sequences that they generate."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxtrain.base.annotations import Json, JsonMapping
from jaxtrain.errors import UserError
from jaxtrain.hub.generate import Generated, generate
from jaxtrain.serving import wire
from jaxtrain.serving.api_parts import section
from jaxtrain.serving.datums import Datum, checked
from jaxtrain.train_step.state import Params

if TYPE_CHECKING:
    from jaxtrain.serving.lora_engine import Engine, Shape
    from jaxtrain.serving.saved_adapters import Place

UNSUPPORTED = ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k")


@dataclass
class Sampler:
    """Adapters that sequences are generated with."""

    owner: str
    session: str
    base_model: str
    place: "Place | None" = None  # where they are saved; None: they are in memory alone
    shape: "Shape | None" = None
    params: Params | None = None
    is_base: bool = False  # it has none


@dataclass(frozen=True)
class How:
    """The settings that requests have to agree in to be generated together."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    stop: tuple[str | int, ...] | None  # None: the tokens that end a text of the model


@dataclass(frozen=True)
class SampleRequest:
    """A prompt, and how many sequences are wanted behind it."""

    prompt: tuple[int, ...]
    count: int
    seed: int
    how: How
    prompt_logprobs: int  # of how many of the last tokens


def request_of(body: JsonMapping, engine: "Engine", most: int) -> SampleRequest:
    """Return the request that a JSON object makes; refuse what the engine cannot do."""
    if asked := next((name for name in UNSUPPORTED if body.get(name)), None):
        raise UserError(asked, "it is not supported here", "leave it out; prompt_logprobs and the sampled tokens' own "
                        "are")
    prompt, count = _tokens(body.get("prompt"), engine), _number(body, "num_samples", int, 1)
    if not 1 <= count <= most:
        raise UserError("num_samples", f"{count} is out of range", f"give 1 to {most} (--sample_batch), and more "
                        "requests")
    params = section(body, "sampling_params")
    room, seed = engine.run.config.model.max_seq_len - len(prompt), _number(params, "seed", int, None)
    how = How(min(_number(params, "max_tokens", int, room), room), _number(params, "temperature", float, 1.0),
              max(_number(params, "top_k", int, -1), 0), _number(params, "top_p", float, 1.0),
              _stops(params.get("stop"), engine))
    if how.max_tokens < 1:
        raise UserError("max_tokens", f"{how.max_tokens} is below 1", "give 1 or more")
    if not 0 <= how.temperature < 1e6 or not 0 < how.top_p <= 1 or how.top_k >= 2**31:
        raise UserError("sampling_params", f"temperature={how.temperature}, top_p={how.top_p}, top_k={how.top_k}: one "
                        "of them is out of range", "give a temperature of 0 or more, and top_p above 0 and at most 1")
    logprobs = 0
    if body.get("prompt_logprobs") and len(prompt) > 1:
        logprobs = min(_number(body, "prompt_logprobs_last_n", int, len(prompt) - 1), len(prompt) - 1)
    return SampleRequest(prompt, count, secrets.randbits(63) if seed is None else seed, how, max(logprobs, 0))


def _number(body: JsonMapping, name: str, kind: type, default: Json) -> Json:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise UserError(name, f"{repr(value)[:50]} is not a number", "send what the package tinker 0.38 does")
    return kind(value)


def _tokens(prompt: object, engine: "Engine") -> tuple[int, ...]:
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    if not isinstance(chunks, list) or not all(isinstance(chunk, dict) for chunk in chunks):
        raise UserError("prompt", "it has no chunks", "send what the package tinker 0.38 does")
    if other := next((chunk for chunk in chunks if chunk.get("type", "encoded_text") != "encoded_text"), None):
        raise UserError("prompt", f"it has a chunk of type {repr(other.get('type'))[:50]}", "give tokens of text")
    parts = [chunk.get("tokens", []) for chunk in chunks]
    if not all(isinstance(part, list) for part in parts):
        raise UserError("prompt", "the tokens of a chunk are no list", "send what the package tinker 0.38 does")
    tokens = [token for part in parts for token in part]
    longest = engine.run.config.model.max_seq_len - 1
    if not 1 <= len(tokens) <= longest:
        raise UserError("prompt", f"it has {len(tokens):,} tokens", f"give 1 to {longest:,}, which leaves room for one "
                        "more")
    if wrong := [token for token in tokens if type(token) is not int or not 0 <= token < engine.vocabulary]:
        raise UserError("prompt", f"{repr(wrong[0])[:50]} is not a token of the model, which has {engine.vocabulary:,}",
                        "use the tokenizer of the model")
    return tuple(tokens)


def _stops(given: object, engine: "Engine") -> tuple[str | int, ...] | None:
    if given is None:
        return None
    stops = [given] if isinstance(given, str) else given
    good = isinstance(stops, list) and len(stops) <= 64 and all(
        (isinstance(one, str) and one) or (type(one) is int and 0 <= one < 2**31) for one in stops)
    if not good:
        raise UserError("stop", "it is neither texts nor tokens", "give a text, or a list of up to 64 texts or tokens")
    if engine.words is None and any(isinstance(one, str) for one in stops):
        raise UserError("stop", "the model's folder has no tokenizer, which texts need", "give tokens")
    return tuple(stops)


def sampled(shape: "Shape", params: Params, requests: Sequence[SampleRequest], batch: int) -> list[bytes]:
    """Return the answers of requests that agree in how tokens are chosen."""
    how, engine = requests[0].how, shape.engine
    prompts = [list(one.prompt) for one in requests for _ in range(one.count)]
    drawn = [(_seed(one.seed, number), 0) for one in requests for number in range(one.count)]
    # Texts end a sequence beside the model's own end; tokens that are given take the place of that.
    keeps_end = how.stop is None or any(isinstance(one, str) for one in how.stop)
    found = generate(shape.run, shape.state(params), prompts, max_new_tokens=how.max_tokens, drawn=drawn,
                     temperature=how.temperature, top_k=how.top_k, top_p=how.top_p, logprobs=True, ignore_end=True,
                     stop=[*(how.stop or ()), *(engine.ends if keeps_end else ())], keep_stop=True,
                     batch_size=batch, tokenizer=engine.words or "")
    before = _prompt_logprobs(shape, params, requests)
    answers, at = [], 0
    for request, logprobs in zip(requests, before, strict=True):
        answers.append(wire.sample_response([_sequence(one) for one in found[at:at + request.count]], logprobs))
        at += request.count
    return answers


def _seed(seed: int, number: int) -> int:
    """Return the seed of one sequence of a request."""
    return int(np.random.SeedSequence([seed & (2**64 - 1), number]).generate_state(1)[0])


def _sequence(one: Generated) -> tuple[int, np.ndarray, np.ndarray]:
    tokens, logprobs = list(one.tokens), list(one.logprobs or ())
    if one.end is not None:  # the API counts the token that ends a sequence among its tokens
        tokens.append(one.end[0])
        logprobs.append(one.end[1])
    reason = wire.STOP if one.finish_reason == "stop" else wire.LENGTH
    return reason, np.array(tokens, np.int32), np.array(logprobs, np.float32)


def _prompt_logprobs(shape: "Shape", params: Params, requests: Sequence[SampleRequest]) -> list[np.ndarray | None]:
    """Return the log-probability of each token of the prompts for which it was asked, else NaN."""
    asking = [one for one in requests if one.prompt_logprobs]
    if not asking:
        return [None] * len(requests)
    ids = [np.array(one.prompt, np.int32) for one in asking]
    datums = checked([Datum(one[:-1], {"target_tokens": one[1:], "weights": np.ones(len(one) - 1, np.float32)})
                      for one in ids], "cross_entropy", {}, vocabulary=shape.engine.vocabulary,
                     longest=shape.engine.longest)
    _, logprobs = shape.forward(params, datums, "cross_entropy")
    found = []
    for one, its in zip(asking, logprobs, strict=True):
        whole = np.full(len(one.prompt), np.nan, np.float32)
        whole[-one.prompt_logprobs:] = its[-one.prompt_logprobs:]
        found.append(whole)
    waiting = iter(found)
    return [next(waiting) if one.prompt_logprobs else None for one in requests]

"""A sampler behind a URL (`rl.sampler`): answers by the weights that it is sent, while steps go on.

One thread takes what is asked in order: it sees that the server has the weights, asks for all answers (or for those of
one turn of conversations) at once, and asks again for those that did not come, until the time limit. An answer counts
only where the server had these weights before and after it (adapters: under the version's name, which requests give),
so that one that was started again is sent them again, and nothing that it made of others is taken.
"""

import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from jaxtrain.errors import UserError
from jaxtrain.hub.generate import Generated
from jaxtrain.observe import events
from jaxtrain.tuning.http_service import Failed
from jaxtrain.tuning.samplers.asked_in_turn import AskedInTurn, Job, Stopped
from jaxtrain.tuning.samplers.completions import Question, Terms, Unfinished
from jaxtrain.tuning.samplers.sent_weights import Weights
from jaxtrain.tuning.samplers.vllm_routes import KEY, VllmServer, told

AT_ONCE = 128  # requests
PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0)  # before the next try; the last one again and again


class RemoteSampler(AskedInTurn[Weights]):
    """A server that answers for the first process."""

    def __init__(self, server: VllmServer, terms: Terms, timeout_s: float, adapters: bool, workdir: Path | None = None):
        """`adapters`: the weights that it is sent are adapters. `workdir`: where events are recorded."""
        super().__init__()
        self.server, self.terms, self.timeout_s, self.adapters = server, terms, timeout_s, adapters
        self._workdir = workdir
        self._sent = ""  # the version that it was sent last
        self._checked = terms.temperature == 1

    def _made(self, job: Job[Weights], stop: threading.Event) -> list[Generated]:
        """Return all answers of a job; raise UserError if they are not there in time."""
        start = time.monotonic()
        server, tokens, seconds = replace(self.server, until=start + self.timeout_s), 0, 0.0

        def answering(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Generated]:
            nonlocal tokens, seconds
            began = time.monotonic()
            questions = [Question(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
            elsewhere = began - start - seconds  # what an environment took
            try:
                found = self._answers(server, job, questions, stop)
            except UserError as error:
                if error.key == KEY and elsewhere > self.timeout_s / 2 and time.monotonic() >= start + self.timeout_s:
                    raise UserError("rl.sampler_timeout_s", f"the conversations of a step took longer than "
                                    f"{self.timeout_s:g} s, of which rl.environment took {elsewhere:.1f} s",
                                    "raise it, or rl.environment_workers") from None
                raise
            seconds += time.monotonic() - began
            tokens += sum(len(one.tokens) + (one.end is not None) for one in found)
            return found

        answers = job.asking(answering)
        self._took(seconds, tokens)
        return answers

    def _answers(self, server: VllmServer, job: Job[Weights], questions: Sequence[Question],
                 stop: threading.Event) -> list[Generated]:
        """Return the answers to questions; raise UserError if they are not there in time."""
        tries, found = 0, {}
        while True:
            if stop.is_set():
                raise Stopped
            try:
                self._send(server, job.weights)
                self._check_temperature(server, job, questions[0])
                missing = [n for n in range(len(questions)) if n not in found]
                vouched = _Vouched(server, "" if self.adapters else job.weights.version)
                got = _at_once(functools.partial(self._asked, server, job, questions, vouched), missing, stop)
                if stop.is_set():
                    raise Stopped
                found |= {n: one for n, one in got.items() if isinstance(one, Generated)}
                if len(found) == len(questions):
                    return [found[n] for n in range(len(questions))]
                why: Failed = next(one for one in got.values() if isinstance(one, Failed))
            except Failed as error:
                why = error
                if not error.may_pass:
                    raise UserError(KEY, f"{self.server.service.url} {told(error)}",
                                    "check the URL, and the model that it serves") from None
            if stop.is_set():
                raise Stopped
            pause = PAUSES_S[min(tries, len(PAUSES_S) - 1)]
            if time.monotonic() + pause >= server.until:
                raise UserError(KEY, f"{self.server.service.url} {told(why)}; {len(found)} of {len(questions)} "
                                f"answers came in {self.timeout_s:g} s",
                                "check that the server is up, or raise rl.sampler_timeout_s")
            tries += 1
            self._add("sampler_retries", 1)
            stop.wait(pause)

    def _send(self, server: VllmServer, weights: Weights) -> None:
        """See that the server has these weights."""
        has = weights.version in server.models() if self.adapters else server.version() == weights.version
        if has:
            return
        if self._sent == weights.version and self._workdir is not None:
            events.tell(self._workdir, "sampler_restarted", f"the sampler has lost {weights.version}, which is sent to "
                        "it again", version=weights.version)
        began, before = time.monotonic(), self._sent
        if self.adapters:
            if (base := server.base_version()) != "default":
                raise UserError(KEY, f"{server.service.url} has weights that another run sent it ({base[:60]}), and "
                                "adapters are for those that it began with", "start it again")
            server.load_adapter(weights.folder.absolute(), weights.version)
            if before and before != weights.version:
                server.unload_adapter(before)
        else:
            server.load_model(weights.folder.absolute(), weights.version)
        self._sent = weights.version
        self._add("sampler_load_s", time.monotonic() - began)

    def _asked(self, server: VllmServer, job: Job[Weights], questions: Sequence[Question], vouched: "_Vouched",
               n: int) -> Generated | Failed:
        """Return an answer, or why there is none that may come yet."""
        one = questions[n]
        try:
            answer = self.terms.answer(one, server.completed(self.terms.request(one, self._model(job))))
            vouched.check(time.monotonic())
            return answer
        except Failed as error:
            lost = self.adapters and error.status == 404  # the adapter, in a server that was started again
            if error.may_pass or lost:
                return error if error.may_pass else Failed(f"{error}")
            raise
        except Unfinished as error:
            return Failed(f"{error}")
        except ValueError as error:
            raise UserError(KEY, f"what {self.server.service.url} answers is of no use: {error}",
                            "use a server whose completions support return_token_ids and logprobs, such as vLLM, with "
                            "the model of this run") from None

    def _model(self, job: Job[Weights]) -> str:
        return job.weights.version if self.adapters else self.server.model

    def _check_temperature(self, server: VllmServer, job: Job[Weights], question: Question) -> None:
        """Refuse a server whose log-probabilities are not of the model at the temperature of sampling."""
        if self._checked:
            return
        likeliest = []
        for temperature in (self.terms.temperature, 1.0):
            asked = self.terms.request(question, self._model(job)) | {
                "temperature": temperature, "logprobs": 1, "max_tokens": 1}
            response = server.completed(asked)
            try:
                likeliest.append(max(response["choices"][0]["logprobs"]["top_logprobs"][0].values()))
            except (LookupError, TypeError, AttributeError, ValueError):
                return  # what is wrong with it is told of the answers
        if likeliest[0] == likeliest[1]:
            raise UserError("rl.temperature", f"the log-probabilities of {self.server.service.url} are those at "
                            f"temperature 1, not at {self.terms.temperature:g}",
                            "start vLLM with --logprobs-mode=processed_logprobs, or leave it out")
        self._checked = True


class _Vouched:
    """Checks that a server still has the version that it had; one check is for all answers that came before it."""

    def __init__(self, server: VllmServer, version: str):
        """`version`: "" checks nothing."""
        self._server, self._version = server, version
        self._lock, self._checked = threading.Lock(), 0.0

    def check(self, came: float) -> None:
        """Raise `Failed` unless the server had the version after this moment."""
        with self._lock:
            if self._version and self._checked < came:
                now = time.monotonic()
                if self._server.version() != self._version:
                    raise Failed("was started again while it answered")
                self._checked = now


def _at_once(work: Callable[[int], Generated | Failed], numbers: Sequence[int],
             stop: threading.Event) -> dict[int, Generated | Failed]:
    """Return what `work` makes of each number, several at once on threads of their own; raise what it raises first."""
    found: dict[int, Generated | Failed] = {}
    done, left, errors = queue.SimpleQueue[None](), iter(numbers), []
    taking = threading.Lock()

    def run() -> None:
        while not errors and not stop.is_set():
            with taking:
                n = next(left, None)
            if n is None:
                break
            try:
                found[n] = work(n)
            except BaseException as error:
                errors.append(error)
        done.put(None)

    count = min(AT_ONCE, len(numbers))
    for _ in range(count):
        threading.Thread(target=run, name="sampler", daemon=True).start()
    for _ in range(count):
        while True:
            try:
                done.get(timeout=0.2)
                break
            except queue.Empty:
                if stop.is_set():
                    raise Stopped from None
                if errors:
                    raise errors[0] from None
    if errors:
        raise errors[0]
    return found

"""Rewards of answers from a scorer behind a URL: a program of the user's own, on this machine or another."""

import base64
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import parsed
from jaxtrain.redaction import is_hidden
from jaxtrain.tuning.rewards import KEY

TRIES = 4
PAUSE_S = 1.0  # before the second try; twice as long before each later one
MOST = 256  # answers in a request
LIMIT = 2**20  # bytes of a response


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes redirects errors: urllib would follow them without the answers."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        """Return no request to go on with."""


_opener = urllib.request.build_opener(_NoRedirects)


@dataclass(frozen=True)
class RemoteRewards:
    """A scorer that is asked by HTTP. The first process calls it."""

    url: str  # with its credentials
    timeout_s: float  # of a request

    def __post_init__(self):
        if is_hidden(self.url):
            raise UserError(KEY, f"the credentials of {self.url} are not written down", "give the whole URL again")
        try:
            parts = urllib.parse.urlsplit(self.url)
            right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            (parts.hostname or "").encode("idna")
        except ValueError:
            right = False
        if not right or not self.url.isascii() or not self.url.isprintable() or " " in self.url:
            raise UserError(KEY, f"{self.url} is not the URL of a scorer",
                            "write http://HOST:PORT/PATH, with special characters percent-encoded")

    @classmethod
    def of(cls, config: Config) -> "RemoteRewards":
        """Return the scorer that a config names; all tries of a request must end before the run counts as hung."""
        limit, longest = config.reinforce.reward_timeout_s, config.resilience.hang_floor
        tries = TRIES * limit + PAUSE_S * (2 ** (TRIES - 1) - 1)
        if config.resilience.hang_factor and tries > longest:
            raise UserError("reinforce.reward_timeout_s", f"{TRIES} tries of {limit:g} s take longer than resilience."
                            f"hang_floor={longest:g} s, after which a run counts as hung",
                            f"set resilience.hang_floor={2 * tries:.0f}, or allow less time")
        return cls(config.reinforce.reward, limit)

    def __call__(self, answers: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the reward of each answer to a prompt, given the prompt's record."""
        found = []
        for first in range(0, len(answers), MOST):
            part = slice(first, first + MOST)
            found += self._rewards(answers[part], records[part])
        return found

    def _rewards(self, answers: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[float]:
        content = self._tried(json.dumps({"answers": answers, "records": records}).encode())
        try:
            found = parsed(content, {"rewards": [int | float]})["rewards"]
        except ValueError as error:
            raise UserError(KEY, f"what {self.url} answers cannot be read ({error})",
                            'let it answer {"rewards": [NUMBER, ...]}') from None
        if len(found) != len(answers):
            raise UserError(KEY, f"{self.url} gives {len(found)} rewards for {len(answers)} answers",
                            "let it give one for each")
        for answer, value in zip(answers, found, strict=True):
            if not abs(value) < 1e30:  # nor infinite in float32
                raise UserError(KEY, f"{self.url} gives {str(value)[:20]} for the answer {answer[:40]!r}",
                                "let it give numbers below 1e30")
        return [float(value) for value in found]

    def _tried(self, content: bytes) -> bytes:
        """Return what the scorer answers, after several tries where an error may pass."""
        why = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE_S * 2 ** (attempt - 1))
            try:
                return self._posted(content)
            except urllib.error.HTTPError as error:
                error.close()
                why = f"answers {error.code} {error.reason}"
                if error.code != 429 and error.code < 500:
                    raise UserError(KEY, f"{self.url} {why}", "check the URL and what its server takes") from None
            except (OSError, http.client.HTTPException) as error:
                cause = getattr(error, "reason", error)
                why = f"does not answer ({str(cause) or type(cause).__name__})"
        raise UserError(KEY, f"{self.url} {why}, in {TRIES} tries of at most {self.timeout_s:g} s",
                        "check that the scorer is up, or raise reinforce.reward_timeout_s")

    def _posted(self, content: bytes) -> bytes:
        until = time.monotonic() + self.timeout_s
        parts = urllib.parse.urlsplit(self.url)
        user, _, place = parts.netloc.rpartition("@")
        headers = {"Content-Type": "application/json"}
        if user:
            headers["Authorization"] = f"Basic {base64.b64encode(urllib.parse.unquote_to_bytes(user)).decode()}"
        request = urllib.request.Request(parts._replace(netloc=place).geturl(), content, headers)
        with _opener.open(request, timeout=self.timeout_s) as response:
            size, found = response.length, b""
            while size is None or len(found) < size:
                chunk = response.read1(2**16)
                found += chunk
                if time.monotonic() > until:  # the limit of sockets is for each read
                    raise TimeoutError("timed out")
                if len(found) > LIMIT:
                    raise UserError(KEY, f"{self.url} answers more than {LIMIT:,} bytes", "let it answer rewards only")
                if not chunk:
                    break
        if size is not None and len(found) < size:
            raise http.client.IncompleteRead(found, size - len(found))
        return found

"""The answers that steps are trained on, in WORKDIR/rollouts/STEP.jsonl: a line for each, with its rewards."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import LARGE, parsed, read
from jaxtrain.hub.generate import Generated
from jaxtrain.tuning.environments.conversation import FORM, Conversation, Valued, sampled_tokens
from jaxtrain.tuning.routes import sampled_routes

FIX = "bring it back, or delete it: the model that goes on answers in its place"


@dataclass
class Round:
    """The answers that one step, or several with `rl.reuse`, are trained on."""

    numbers: list[int]  # of each answer's prompt
    answers: Sequence[Generated]
    policy_step: int  # the steps that the model had made that answered
    scores: list[list[float]] | None = None  # of each answer by each scorer; None: not known yet
    taught: list[list[float]] | None = None  # log-probability of each token by the teacher; None: not known, or none
    weights: str = ""  # the version of the weights that another process answered by; "": this run answered


@dataclass(frozen=True)
class RolloutFiles:
    """The files of a run, whose prompts are those of `records`.

    `names`: of the scorers; several are written by name.
    """

    folder: Path
    records: Sequence[JsonMapping]
    names: tuple[str, ...]
    valued: bool  # answers have the values that a head expected
    taught: bool  # and the log-probabilities of a teacher
    turns: bool = False  # they are conversations
    routed: bool = False  # answers have the routes of their tokens

    def path(self, first: int) -> Path:
        """Return the file of the answers that are first trained on in this step, counted from 0."""
        return self.folder / f"{first + 1}.jsonl"

    def write(self, first: int, one: Round, totals: Sequence[float] | None, durable: bool) -> None:
        """Write answers, with their rewards if these are known; the first process does it.

        Args:
            first: the first step that is trained on them.
            one: the answers.
            totals: the reward of each.
            durable: checkpoints to come depend on what is written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"prompt": self.records[n]["prompt"], "number": n, **self._scored(one, totals, at),
                             "policy_step": one.policy_step, **({"weights": one.weights} if one.weights else {}),
                             **_plain(answer)}, ensure_ascii=False)
                 for at, (n, answer) in enumerate(zip(one.numbers, one.answers, strict=True))]
        if self.routed:
            sampled_routes.write(self.path(first), one.answers, durable)
        atomic_files.write(self.path(first), "".join(f"{line}\n" for line in lines), durable=durable)

    def _scored(self, one: Round, totals: Sequence[float] | None, at: int) -> JsonObject:
        """Return what is known of the worth of an answer."""
        if one.scores is None or totals is None:
            return {}
        return {"reward": totals[at], "scores": dict(zip(self.names, one.scores[at], strict=True)),
                **({"taught": one.taught[at]} if one.taught else {})}

    def there(self, first: int) -> bool:
        """Return whether there is a file of this step, as the first process sees it. Every process makes the call."""
        return exchange(None, lambda _: self.path(first).is_file())

    def read(self, first: int, made: int, numbers: Sequence[int], drawn: bool) -> Round:
        """Return the answers of a step from its file.

        Args:
            first: the first step that is trained on them.
            made: the step of the model that made them, where the file does not say it.
            numbers: of the prompts that they have to answer.
            drawn: they may answer other prompts of the run too, as dynamic sampling chose them.
        """
        path = self.path(first)
        try:
            kind, more = ((Conversation, FORM) if self.turns else (Valued, {"values": [float]}) if self.valued else
                          (Generated, {}))
            lines = [parsed(line, {"reward?": float | int, "scores?": dict, "number?": int, "policy_step?": int,
                                   "weights?": str, "tokens": [int], "logprobs": [float], **more})
                     for line in read(path, LARGE).splitlines()]
            made = lines[0].get("policy_step", made) if lines else made
            weights = lines[0].get("weights", "") if lines else ""
            scores = [self._scores(line) for line in lines if "reward" in line]
            taught = [[float(x) for x in line["taught"]] for line in lines if self.taught and "reward" in line]
            others = ("prompt", "number", "policy_step", "reward", "scores", "taught", "weights")
            rest: list[JsonObject] = [{key: tuple(value) if isinstance(value, list) else value
                                       for key, value in line.items() if key not in others} for line in lines]
            found: list[Generated] = [kind(**one) for one in rest]
            if any(len(sampled_tokens(one)) != len(one.tokens) for one in found if isinstance(one, Conversation)):
                raise ValueError("turns do not have as many tokens as the conversation")
            if self.routed:
                found = sampled_routes.read(path, found)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError("rl", f"{path} is not as the run wrote it ({error})", FIX) from error
        if len(found) != len(numbers) or len(scores) not in (0, len(numbers)):
            raise UserError("rl", f"{path} has {len(found)} answers and {len(scores)} rewards instead of "
                            f"{len(numbers)}", FIX)
        asked = [line.get("number", number) if drawn else number for line, number in zip(lines, numbers, strict=True)]
        if any(not 0 <= n < len(self.records) or line["prompt"] != self.records[n]["prompt"]
               for n, line in zip(asked, lines, strict=True)):
            raise UserError("rl", f"{path} has answers to other prompts", FIX)
        return Round(asked, found, made, scores or None, taught or None, weights)

    def _scores(self, line: JsonMapping) -> list[float]:
        """Return the score by each scorer; files of earlier versions have one reward."""
        scores = line["scores"] if "scores" in line else {name: line["reward"] for name in self.names[:1]}
        return [float(scores[name]) for name in self.names]


def _plain(answer: Generated) -> JsonObject:
    """Return an answer as JSON; its routes have a file of their own."""
    plain = asdict(replace(answer, routes=None))
    del plain["routes"]
    return plain

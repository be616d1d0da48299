"""Answers of the model that is trained to prompts, as the batches of its steps.

The batch of a step is a function of the step and of the state before it: a run that resumes makes the same answers, or
with `reinforce.reuse` reads those that it has kept. One answer is a row, behind its prompt.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain.data.chat.templates import Chat
from jaxtrain.data.loading.shuffle import Order
from jaxtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import LARGE, parsed, read
from jaxtrain.hub.generate import Generated, generate
from jaxtrain.hub.generate_texts import chat_of
from jaxtrain.hub.initial_params import source_and_step
from jaxtrain.hub.trained_model import sections_of
from jaxtrain.hub.trained_tokenizer import prompt_ids, tokenizer_of
from jaxtrain.observe.runinfo import recorded_parts
from jaxtrain.redaction import redacted
from jaxtrain.storage import is_url
from jaxtrain.tuning.remote_rewards import RemoteRewards
from jaxtrain.tuning.reward_scores import PREFIX, RewardScores
from jaxtrain.tuning.rewards import Reward, load_reward, rewards_of
from jaxtrain.tuning.values import Valued, known_of, valued

if TYPE_CHECKING:
    from jaxtrain.run import Run
    from jaxtrain.train_step.state import TrainState

FOLDER = "rollouts"  # of a workdir


def on_answers(run: "Run", workdir: str | Path | None = None) -> "Run":
    """Return the run with answers of its own as its data, unless it was given other data.

    `workdir`: where the answers of each step are kept.
    """
    c = run.config.reinforce
    if not isinstance(run.data, Rollouts | None):
        return run
    tokenizer, chat = _words(run, workdir)
    folder = None if workdir is None else Path(workdir) / FOLDER
    reward = (RewardScores.of(c.reward, tokenizer, _recorded(workdir)) if c.reward.startswith(PREFIX) else
              RemoteRewards.of(run.config) if is_url(c.reward) else load_reward(c.reward))
    return replace(run, data=Rollouts(run, read_prompts(c.prompts), reward, tokenizer, folder, chat))


def _recorded(workdir: str | Path | None) -> dict[str, Any]:
    """Return the checkpoint of the reward model that the run in a workdir began with; {}: there is none yet."""
    parts = (None if workdir is None else recorded_parts(workdir)) or {}
    return parts.get("data", {}).get("identity", {}).get("reward_model", {})


def _words(run: "Run", workdir: str | Path | None) -> tuple[Tokenizer, Chat | None]:
    """Return the tokenizer and the chat template that the run has kept, or those of the model that it begins with."""
    source, _ = source_and_step(run.config.train.init_from)
    if workdir is not None and (Path(workdir) / "tokenizer").is_dir():
        source = Path(workdir)
    elif not run.config.train.init_from:
        return load_tokenizer(run.config.data.tokenizer), None
    tokenizer = tokenizer_of(source)
    try:
        chat = chat_of(source, sections_of(source) if (source / "config.json").is_file() else {}, tokenizer, "")
    except UserError:  # of a kind that has no template
        return tokenizer, None
    return tokenizer, chat if chat.source else None


def read_prompts(path: str) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines, each with a "prompt"."""
    try:
        lines = read(Path(path), LARGE).decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("reinforce.prompts", f"{path} cannot be read ({error})", "give a file of JSON lines") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(parsed(line, {"prompt": object}))
            if not isinstance(found[-1]["prompt"], str | list):
                raise ValueError
            json.dumps(found[-1], ensure_ascii=False).encode()  # not half of a character
        except ValueError:
            raise UserError("reinforce.prompts", f"line {number} of {path} has no prompt",
                            'write lines such as {"prompt": "1+2=", "sum": 3}') from None
    if not found:
        raise UserError("reinforce.prompts", f"{path} has no prompts", 'write lines such as {"prompt": "1+2="}')
    return found


class Rollouts:
    """A `BatchSource` of the answers of a run's model; `see` gives it the state to answer with."""

    num_batches = None

    def __init__(self, run: "Run", records: Sequence[dict[str, Any]],
                 reward: Reward | RewardScores | RemoteRewards, tokenizer: Tokenizer, folder: Path | None = None,
                 chat: Chat | None = None):
        """Take prompts.

        Args:
            folder: where the answers of each step are kept, if anywhere.
            chat: the model's chat template, for prompts that are messages; its turns end answers.
        """
        self.run, self.records, self.reward, self.tokenizer, self.folder = run, records, reward, tokenizer, folder
        config = run.config
        self.settings, self.seq_len, self.seed = config.reinforce, config.data.seq_len, config.data.seed
        self.count = config.data.global_batch_size  # of answers in a step
        self.reuse = config.reinforce.reuse  # steps
        self.groups = self.count // self.settings.group_size
        self.order = Order(len(records), self.seed)
        self.chat = chat and chat.identity()  # kept with the run
        self.ends = chat.ends() if chat else []
        self.prompts = [self._encoded(record["prompt"], chat) for record in records]
        self.identity = {"prompts": _digest(records), "reward": redacted(self.settings.reward)}
        if isinstance(reward, RewardScores):
            self.identity["reward_model"] = reward.checkpoint
        self._check_prompts()
        self._seen: tuple[int, Any] = (-1, None)
        self._made: tuple[int, dict[str, np.ndarray]] = (-1, {})

    def _encoded(self, prompt: Any, chat: Chat | None) -> list[int]:
        """Return the tokens of a text, or of messages through the chat template."""
        if isinstance(prompt, str):
            return prompt_ids(self.tokenizer, prompt)
        if chat is None:
            raise UserError("reinforce.prompts", "one is a list of messages, and the model has no chat template",
                            "give texts, or begin with a model that has one")
        return chat.prompt(prompt)

    def _check_prompts(self) -> None:
        room = self.seq_len - self.settings.max_new_tokens
        for record, prompt in zip(self.records, self.prompts, strict=True):
            if not prompt:
                raise UserError("reinforce.prompts", "one is empty", "remove it, or begin it with a line's end")
            if len(prompt) > room:
                raise UserError("reinforce.prompts", f"{str(record['prompt'])[:40]!r} has {len(prompt)} tokens, and "
                                f"data.seq_len less reinforce.max_new_tokens leaves {room}",
                                "raise data.seq_len, or remove it")

    def see(self, step: int, state: "TrainState") -> None:
        """Take the state before this step (counted from 0)."""
        self._seen = step, state

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        """Return the answers to the prompts of this step, with their advantages."""
        first = step - step % self.reuse  # the step before which they were made
        if self._made[0] != first:
            if self._seen[0] == first:
                answers, rewards = self._answered(first, self._seen[1])
                self._keep(first, answers, rewards)
            else:
                answers, rewards = self._kept(first, step)
            self._made = first, self._batch(first, answers, rewards)
        return self._made[1]

    def rows(self, step: int, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return only these rows of the batch."""
        return {name: column[list(indices)] for name, column in self[step].items()}

    def shape(self, step: int) -> tuple[int, int]:
        """Return the number of answers, and the length of rows."""
        return self.count, self.seq_len

    def shapes_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the one shape."""
        return [self.shape(start)] if start < stop else []

    def tokens(self, step: int) -> int:
        """Return the number of places in all batches before this step."""
        return step * self.count * self.seq_len

    def epochs(self, step: int) -> dict[str, float]:
        """Return how often each prompt was answered before this step, as a group."""
        return {"": step // self.reuse * self.groups / len(self.records)}

    def _numbers(self, step: int) -> list[int]:
        """Return the number of each answer's prompt."""
        places = step // self.reuse * self.groups + np.arange(self.groups)
        return np.repeat(self.order.rows(places), self.settings.group_size).tolist()

    def _answered(self, step: int, state: "TrainState") -> tuple[list[Generated], list[float]]:
        """Return answers and their rewards."""
        numbers = self._numbers(step)
        prompts, records = [self.prompts[n] for n in numbers], [self.records[n] for n in numbers]
        seed = int(np.random.SeedSequence([self.seed, step]).generate_state(1)[0])
        answers = generate(self.run, state, prompts, max_new_tokens=self.settings.max_new_tokens, seed=seed,
                           stop=self.ends, logprobs=True, batch_size=self.count, tokenizer=self.tokenizer)
        if self.settings.value_head:
            answers = valued(self.run, state, prompts, answers)
        if isinstance(self.reward, RewardScores):
            return answers, self.reward([[*prompt, *answer.tokens]
                                         for prompt, answer in zip(prompts, answers, strict=True)])
        texts = [answer.text for answer in answers]
        score = self.reward if isinstance(self.reward, RemoteRewards) else partial(rewards_of, self.reward)
        return answers, exchange(None, lambda _: score(texts, records))  # one process asks: it may depend on anything

    def _batch(self, step: int, answers: list[Generated], rewards: list[float]) -> dict[str, np.ndarray]:
        known, prompts = known_of(self.settings, rewards, answers), [self.prompts[n] for n in self._numbers(step)]
        rows = [self._row(*each) for each in zip(prompts, answers, rewards, known, strict=True)]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, prompt: list[int], answer: Generated, reward: float,
             known: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return an answer behind its prompt, as targets of weight 1, with the end that the model chose.

        `known`: further arrays of its tokens.
        """
        end, logprob = answer.end or (None, None)
        ids = [*prompt, *answer.tokens, *([] if end is None else [end])]
        said = [*(answer.logprobs or ()), *([] if end is None else [logprob])]
        size, first = len(ids) - 1, len(prompt) - 1
        row: dict[str, Any] = {name: np.zeros(self.seq_len, np.int32)
                               for name in ("tokens", "targets", "segments", "positions")}
        row |= {name: np.zeros(self.seq_len, np.float32)
                for name in ("weights", "sampled", "rewards", "answers", *known)}
        row["tokens"][:size], row["targets"][:size] = ids[:-1], ids[1:]
        row["segments"][:size], row["positions"][:size] = 1, np.arange(size)
        row["weights"][first:size], row["sampled"][first:size] = 1, said
        for name, each in known.items():
            row[name][first:size] = each
        row["rewards"][first], row["answers"][first] = reward, 1
        return row

    def _keep(self, step: int, answers: list[Generated], rewards: list[float]) -> None:
        """Write the answers of a step, if there is a folder for them."""
        import jax

        if self.folder is None or jax.process_index():
            return
        lines = [json.dumps({"prompt": self.records[n]["prompt"], "reward": reward, **asdict(answer)},
                            ensure_ascii=False)
                 for n, answer, reward in zip(self._numbers(step), answers, rewards, strict=True)]
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_files.write(self.folder / f"{step + 1}.jsonl", "".join(f"{line}\n" for line in lines))

    def _kept(self, step: int, asked: int) -> tuple[list[Generated], list[float]]:
        """Read the answers of an earlier step, which are trained on again."""
        if self.folder is None or asked == step:
            raise UserError("batch", f"that of step {asked} is made of what the model answers at step {step}",
                            f"call run.data.see({step}, state) first")
        path = self.folder / f"{step + 1}.jsonl"
        try:
            kind, more = (Valued, {"values": [float]}) if self.settings.value_head else (Generated, {})
            lines = [parsed(line, {"reward": float | int, "tokens": [int], "logprobs": [float], **more})
                     for line in read(path, LARGE).splitlines()]
            rewards = [float(line.pop("reward")) for line in lines]
            found = [kind(**{key: line[key] for key in line if key != "prompt"}) for line in lines]
        except (OSError, ValueError, TypeError) as error:
            raise UserError("reinforce.reuse", f"{path} is not as the run wrote it ({error})",
                            "go back to an earlier checkpoint, or bring it back") from error
        if len(found) != self.count:
            raise UserError("reinforce.reuse", f"{path} has {len(found)} answers instead of {self.count}",
                            "go back to an earlier checkpoint, or bring it back")
        return found, rewards


def _digest(records: Sequence[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()[:16]

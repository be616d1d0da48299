"""Answers of the model that is trained to prompts, as the batches of its steps.

The batch of a step is a function of the step and of the state that answers, the one before the step or, with
`rl.staleness`, an earlier one: a run that resumes makes the same answers, or reads those that a state before its
checkpoint made. The answers of a step are written before it, and so before any checkpoint that depends on them. One
answer is a row, behind its prompt.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.chat.templates import Chat
from jaxtrain.data.loading.shuffle import Order
from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import UserError
from jaxtrain.hub.generate import Generated
from jaxtrain.observe import events
from jaxtrain.redaction import redacted
from jaxtrain.run import Run
from jaxtrain.train_step.state import TrainState
from jaxtrain.tuning.answers.batch_row import row_of
from jaxtrain.tuning.answers.own_mesh import OwnMesh
from jaxtrain.tuning.answers.prompt_tokens import encoded
from jaxtrain.tuning.environments.conversation import Conversation, earned, measured, sampled_tokens
from jaxtrain.tuning.environments.conversing import Conversing, alone
from jaxtrain.tuning.environments.protocol import Environment
from jaxtrain.tuning.pending_rewards import PendingRewards
from jaxtrain.tuning.remote_teacher import RemoteTeacher
from jaxtrain.tuning.rewards import answers_of_step, equal_groups, totals_of, with_lengths
from jaxtrain.tuning.rollout_files import RolloutFiles, Round
from jaxtrain.tuning.samplers import Sampler
from jaxtrain.tuning.samplers.completions import Answering
from jaxtrain.tuning.samplers.remote_rounds import Wanted, round_of
from jaxtrain.tuning.scorers import Scorers
from jaxtrain.tuning.teacher_scores import TeacherScores, sampled_of
from jaxtrain.tuning.values import known_of, valued


class Rollouts:
    """A `BatchSource` of the answers of a run's model; `see` gives it the state to answer with."""

    num_batches = None
    answers_in_a_row = 1

    def __init__(self, run: Run, records: Sequence[JsonObject], scorers: Scorers, tokenizer: Tokenizer,
                 folder: Path | None = None, chat: Chat | None = None, ends: Sequence[int] = (),
                 teacher: TeacherScores | RemoteTeacher | None = None, environment: Environment | None = None,
                 sampler: Sampler | None = None):
        """Take prompts.

        Args:
            folder: where the answers of each step are kept, if anywhere.
            chat: the model's chat template, for prompts that are messages; its turns end answers.
            ends: tokens that end answers as well.
            teacher: whose log-probabilities are added to advantages.
            environment: what the model talks to about prompts; None: it answers them once.
            sampler: what answers in place of this run, in another process.
        """
        self.run, self.records, self.scorers, self.tokenizer, self.folder = run, records, scorers, tokenizer, folder
        config, c = run.config, run.config.rl
        self.settings, self.seq_len, self.seed = c, config.data.seq_len, config.data.seed
        self.mask_truncated = c.mask_truncated
        self.rows_of_step = config.data.global_batch_size
        self.count = answers_of_step(config)
        self.reuse, self.staleness = c.reuse, c.staleness  # steps
        self.sampling_rounds = c.sampling_rounds
        self.groups = self.count // c.group_size
        self.order = Order(len(records), self.seed)
        self.chat = chat and chat.identity()  # kept with the run
        self.ends = [*(chat.ends() if chat else []), *ends]
        self._mesh = OwnMesh(run, tokenizer, self.ends, self.count)
        self.environment, self._conversing, room = environment, None, self.seq_len // self.answers_in_a_row
        if environment:
            self._conversing = Conversing(environment, tokenizer, chat, c, room, self._tell)
        self.prompts = [] if environment else encoded(
            records, tokenizer, chat, room - c.max_new_tokens, self.answers_in_a_row > 1)
        self.identity = {"prompts": _digest(records), "reward": redacted(config.rl.reward)}
        if scorers.model is not None:
            self.identity["reward_model"] = scorers.model.checkpoint
        self.teacher = teacher
        if teacher is not None:
            self.identity |= {"teacher": redacted(self.settings.teacher), "teacher_model": teacher.checkpoint}
        self.sampler = sampler
        if environment:
            self.identity["environment"] = redacted(c.environment)
        self._pending = PendingRewards(scorers.asked, scorers.threads(self.staleness))
        self._files = None if folder is None else RolloutFiles(
            folder, records, scorers.names, self.settings.value_head, teacher is not None,
            environment is not None, c.replay_routes)
        self._fields: dict[str, float] = {}  # of the next line of metrics
        self._begin()

    def see(self, step: int, state: TrainState) -> None:
        """Take the state before this step (counted from 0)."""
        if self._seen[1] is not None and step != self._seen[0] + 1:  # another beginning, as after a rollback
            self.forget()
        self._seen = step, state

    def forget(self) -> None:
        """Forget all states and answers, and end what runs beside the steps: they end, or begin elsewhere."""
        if self.sampler is not None:
            self.sampler.stop()
        if self.environment:  # which a thread of the sampler's may be waiting for
            self.environment.end()
        if self.sampler is not None:
            self.sampler.forget()
        self._pending.forget()
        self._begin()

    def before_save(self) -> None:
        """See that a run that is killed after a save can go on with the same answers."""
        if self.sampler is not None:
            self.sampler.before_save()

    def _begin(self) -> None:
        """Have seen no state, and made no answers."""
        self._seen: tuple[int, Any] = (-1, None)
        self._rounds: dict[int, Round] = {}  # by their first steps: that of this step, and those made ahead
        self._made: tuple[int, dict[str, np.ndarray]] = (-1, {})

    def pop_fields(self) -> dict[str, float]:
        """Return what was measured since the last call, for the line of a step."""
        found, self._fields = self._fields | self._mesh.pop_fields(), {}
        return found | (self.sampler.pop_fields() if self.sampler is not None else {})

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        """Return the answers to the prompts of this step, with their advantages."""
        first = step - step % self.reuse  # of the steps that are trained on the same answers
        for later in range(first, step + self.staleness + 1, self.reuse):
            if later not in self._rounds:
                self._rounds[later] = self._round(later, step)
        self._rounds = {begin: one for begin, one in self._rounds.items() if begin >= first}
        if self._made[0] != first:
            self._made = first, self._batch(self._scored_round(first))
        self._fields["staleness"] = step - self._rounds[first].policy_step
        return self._made[1]

    def rows(self, step: int, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return only these rows of the batch."""
        return {name: column[list(indices)] for name, column in self[step].items()}

    def shape(self, step: int) -> tuple[int, int]:
        """Return the number of answers, and the length of rows."""
        return self.rows_of_step, self.seq_len

    def shapes_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the one shape."""
        return [self.shape(start)] if start < stop else []

    def tokens(self, step: int) -> int:
        """Return the number of places in all batches before this step."""
        return step * self.rows_of_step * self.seq_len

    def epochs(self, step: int) -> dict[str, float]:
        """Return how often each prompt was answered before this step, as a group, if all sampling rounds were needed.
        """
        return {"": step // self.reuse * self.sampling_rounds * self.groups / len(self.records)}

    def _numbers(self, step: int, again: int = 0) -> list[int]:
        """Return the number of each answer's prompt, of the first sampling round or of a later one."""
        rounds = step // self.reuse * self.sampling_rounds + again
        places = rounds * self.groups + np.arange(self.groups)
        return np.repeat(self.order.rows(places), self.settings.group_size).tolist()

    def _round(self, first: int, step: int) -> Round:
        """Return the answers for this first step, and have them scored; `step` is the one whose batch is asked for."""
        import jax

        made, numbers = max(0, first - self.staleness), self._numbers(first)  # made: before which step they are
        if self.sampler is not None:
            wanted = Wanted(made, step, numbers, partial(self._asking, first, numbers))
            kept = self._kept(first, made, numbers)
            found = round_of(self.sampler, wanted, kept, partial(self._state, first, made, step),
                             partial(self._answers_came, first))
            if found is not kept:
                return found
        elif (found := self._kept(first, made, numbers) if made < step else None) is None:
            state = self._state(first, made, step)
            found = (Round(numbers, self._answered(first, numbers, state), step)
                     if self.sampling_rounds == 1 else self._unequal(first, step, state))
            if self.staleness or found.scores is not None:
                self._keep(first, found)
        if jax.process_index() == 0:
            self._have_scored(first, found)
        return found

    def _state(self, first: int, made: int, step: int) -> TrainState:
        """Return the state that answers before this step, in place of an earlier one where `made` says so."""
        import jax

        seen, state = self._seen
        if seen != step or (made < step and self.folder is None):
            raise UserError("batch", f"that of step {max(first, step)} is made of the model's answers at step "
                            f"{made}", f"call run.data.see({made}, state) first")
        if made < step and jax.process_index() == 0:
            assert self.folder is not None and self._files is not None
            events.tell(self.folder.parent, "rollouts_missing", f"{self._files.path(first)} is missing: the model "
                        f"of step {step} answers in place of that of step {made}", step=step)
        return state

    def _answers_came(self, first: int, one: Round) -> None:
        """Take the answers of another process, on a thread of the first one."""
        self._keep(first, one)
        self._have_scored(first, one)

    def _have_scored(self, first: int, one: Round) -> None:
        """Ask for the rewards of answers, where steps go on meanwhile. The first process makes the call."""
        beside = self.staleness > 0 and self.scorers.on_host
        # Answers behind the last step are for a run that is given more of them.
        if beside and one.scores is None and first < self.run.config.train.steps:
            self._pending.ask(first, *self._asked(one))

    def _unequal(self, first: int, step: int, state: TrainState) -> Round:
        """Return answers in groups with unequal rewards, of as many rounds as that takes and as there may be.

        Dynamic sampling: DAPO (arXiv 2503.14476). Groups that are lacking in the end are such with equal rewards.
        """
        found, spare, size = [], [], self.settings.group_size
        rounds = self.sampling_rounds
        for again in range(rounds):
            numbers = self._numbers(first, again)
            one = Round(numbers, self._answered(first, numbers, state, again), step)
            one.scores = self._scored(first, one)
            for at, equal in enumerate(equal_groups(self.settings, self._with_lengths(one))):
                group = slice(at * size, (at + 1) * size)
                (spare if equal else found).append((one.numbers[group], one.answers[group], one.scores[group]))
            if len(found) >= self.groups:
                rounds = again + 1
                break
        self._fields["sampling_rounds"] = rounds
        groups = (found + spare)[:self.groups]
        return Round(*([x for group in groups for x in group[part]] for part in (0, 1)), step,  # type: ignore[arg-type]
                     [x for group in groups for x in group[2]])

    def _answered(self, first: int, numbers: list[int], state: TrainState, again: int = 0) -> list[Generated]:
        """Return answers to these prompts, which are those of this first step in this sampling round."""
        import jax

        jax.block_until_ready(state)  # the time of the step before is not that of the answers
        began = time.perf_counter()
        if self._conversing:
            talk = partial(self._in_turn, self._mesh.laid_out(state), first, again)
            records = [self.records[n] for n in numbers]
            answers, fields = self._conversing.of_step([self.seed, first, again], records, talk)
            self._fields |= {name: self._fields.get(name, 0) * name.endswith("_s") + x for name, x in fields.items()}
            del talk  # and the weights that are laid out for it
        elif self.settings.exact:
            prompts = [self.prompts[n] for n in numbers]
            answers = self._mesh.exact(state, prompts, self._drawn(first, again), self._columns)
        else:
            prompts = [self.prompts[n] for n in numbers]
            answers = self._mesh.sampled(self._mesh.laid_out(state), prompts, self._drawn(first, again))
        if self.settings.value_head:
            answers = valued(self.run, state, [*map(self._prompt, numbers, answers)], answers)
        took = self._took("rollout_s", began)
        many = sum(map(size_of, answers))
        self._fields["rollout_tokens_per_s"] = many / took
        return answers

    def _asking(self, first: int, numbers: list[int], answering: Answering) -> list[Generated]:
        """Return answers by another process, on a thread of the first one."""
        def in_turn(prompts: list[list[int]], places: list[int], turn: int) -> list[Generated]:
            drawn = np.random.SeedSequence([self.seed, first, *[turn] * (turn > 0)]).generate_state(len(numbers))
            return answering(prompts, drawn[places].tolist())

        if self._conversing is None:
            return in_turn([self.prompts[n] for n in numbers], [*range(len(numbers))], 0)
        records = [self.records[n] for n in numbers]
        answers, fields = self._conversing.of_step([self.seed, first, 0], records, in_turn, alone)
        self._fields |= fields
        return answers

    def _drawn(self, first: int, again: int, turn: int = 0) -> int:
        """Return the seed of the answers of this first step, sampling round, and turn of conversations."""
        drawn = [self.seed, first, *[again] * (again > 0 or turn > 0), *[turn] * (turn > 0)]
        return int(np.random.SeedSequence(drawn).generate_state(1)[0])

    def _in_turn(self, state: TrainState, first: int, again: int, prompts: list[list[int]], places: list[int],
                 turn: int) -> list[Generated]:
        """Return the answers of conversations in these places, whatever has become of others."""
        drawn = self._drawn(first, again, turn)
        return self._mesh.sampled(state, prompts, drawn, [(place, 0) for place in places])

    def _prompt(self, number: int, answer: Generated) -> list[int]:
        """Return the tokens that an answer follows, of the prompt of this number."""
        return list(answer.begin) if isinstance(answer, Conversation) else self.prompts[number]

    def _tell(self, text: str) -> None:
        """Tell the user something about conversations."""
        import jax

        if jax.process_index() == 0 and self.folder is not None:
            events.tell(self.folder.parent, "conversations", text)

    def _asked(self, one: Round) -> tuple[list[str], list[JsonObject]]:
        """Return what a scorer is asked."""
        return [answer.text for answer in one.answers], [self.records[n] for n in one.numbers]

    def _scored_round(self, first: int) -> Round:
        """Return this first step's answers with their scores; waits for these if they are pending, and keeps them."""
        one = self._rounds[first]
        if self.sampler is not None:
            began = time.perf_counter()
            list(one.answers)
            self._took("sampler_wait_s", began)
        if one.scores is None:
            one.scores = self._scored(first, one)
            if self.teacher is not None:
                began = time.perf_counter()
                one.taught = self.teacher([*map(self._prompt, one.numbers, one.answers)], one.answers)
                self._took("teacher_s", began)
            self._keep(first, one)
        return one

    def _scored(self, first: int, one: Round) -> list[list[float]]:
        """Return the scores of answers by each scorer."""
        began, on_host, by_model = time.perf_counter(), [], []
        if self.scorers.model is not None:
            by_model = self.scorers.model([[*self._prompt(n, answer), *answer.tokens]
                                           for n, answer in zip(one.numbers, one.answers, strict=True)])
        if self.scorers.on_host:
            on_host, took = exchange(None, lambda _: self._pending.collect(first, *self._asked(one)))
            self._fields["scorer_s"] = self._fields.get("scorer_s", 0) + took
        self._took("reward_s", began)
        given = earned(one.answers, self.settings.group_size)
        return self.scorers.in_order(len(one.answers), on_host, by_model, given)

    def _with_lengths(self, one: Round) -> np.ndarray:
        """Return the scores of answers, with the penalty for their lengths if there is one."""
        assert one.scores is not None
        return with_lengths(self.settings, one.scores, [size_of(answer) for answer in one.answers])

    def _took(self, name: str, began: float) -> float:
        """Add the seconds since a moment to what is measured of a step; return them."""
        took = time.perf_counter() - began
        self._fields[name] = self._fields.get(name, 0) + took
        return took

    def _batch(self, one: Round) -> dict[str, np.ndarray]:
        c, named = self.settings, self._with_lengths(one)
        self._measure(named)
        self._fields |= measured(one.answers)
        known, prompts = known_of(c, named, one.answers), [*map(self._prompt, one.numbers, one.answers)]
        if one.taught is not None:
            ahead = [np.where(sampled_tokens(answer), np.array(theirs) - sampled_of(answer), 0)
                     for theirs, answer in zip(one.taught, one.answers, strict=True)]
            self._fields["reverse_kl"] = -float(np.concatenate(ahead).sum() / sum(map(size_of, one.answers)))
            known = [each | {"advantages": each["advantages"] + c.teacher_weight * more}
                     for each, more in zip(known, ahead, strict=True)]
        return self._columns(zip(prompts, one.answers, totals_of(c, named), known, strict=True))

    def _columns(self, rows: Iterable[tuple]) -> dict[str, np.ndarray]:
        """Return a batch of rows, of each of which the arguments of `_row` are given."""
        rows = [*rows]
        made = [self._row(*each) for each in rows]
        columns = {name: np.stack([row[name] for row in made]) for name in made[0]}
        if self.settings.exact:
            from jaxtrain.tuning.exact.exact_answers import places

            columns |= places(len(made), self.seq_len)
        if self.settings.replay_routes:
            from jaxtrain.tuning.routes.sampled_routes import routes_of

            columns |= routes_of([answer for _, answer, *_ in rows], columns["segments"].sum(1), self.seq_len)
        return columns

    def is_left_out(self, answer: Generated) -> bool:
        """Return whether an answer is not trained on, since it was cut off or its environment failed."""
        return answer.finish_reason == "error" or (self.mask_truncated and answer.finish_reason == "length")

    def _measure(self, scores: np.ndarray) -> None:
        """Take the means of several scores, and how many groups teach nothing, for the line of metrics."""
        c = self.settings
        names = (*self.scorers.names, *["length"] * bool(c.overlong_buffer))
        if len(names) > 1:
            means = zip(names, scores.mean(0).tolist(), strict=True)
            self._fields |= {f"score_{name}": mean for name, mean in means}
        if c.group_size > 1 and self.scorers.names:
            self._fields["equal_groups"] = float(equal_groups(c, scores).mean())

    def _row(self, prompt: list[int], answer: Generated, reward: float,
             known: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return an answer behind its prompt; `known`: further arrays of its tokens."""
        return row_of(self.seq_len, prompt, answer, reward, known, learnt=not self.is_left_out(answer))

    def _keep(self, first: int, one: Round) -> None:
        """Write the answers of a step, if there is a folder for them."""
        import jax

        if self._files is not None and not jax.process_index():
            totals = None if one.scores is None else totals_of(self.settings, self._with_lengths(one)).tolist()
            # Checkpoints to come depend on those that are read again.
            again = self.staleness > 0 or self.reuse > 1 or self.sampler is not None
            self._files.write(first, one, totals, durable=again)

    def _kept(self, first: int, made: int, numbers: list[int]) -> Round | None:
        """Read the answers to these prompts of a step that an earlier state made; None if there are none."""
        if self._files is None or not self._files.there(first):
            return None
        return self._files.read(first, made, numbers, drawn=self.sampling_rounds > 1)


def size_of(answer: Generated) -> int:
    """Return the number of tokens that the model sampled for an answer, with those that end it and its turns."""
    return int(sampled_tokens(answer).sum())


def _digest(records: Sequence[JsonObject]) -> str:
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()[:16]

"""A run that trains on its own answers to prompts (`rl.prompts`): what answers, and what scores the answers."""

import json
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.base.annotations import JsonObject
from jaxtrain.config.sections.tuning_keys import ENVIRONMENT
from jaxtrain.data.chat.templates import Chat
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import LARGE, parsed, read
from jaxtrain.hub.chat_messages import chat_of, kept_template
from jaxtrain.hub.folders import published_files
from jaxtrain.hub.folders.generation_config import ends_of
from jaxtrain.hub.initial_params import source_and_step
from jaxtrain.hub.trained_model import sections_of
from jaxtrain.hub.trained_tokenizer import tokenizer_of
from jaxtrain.run import Extension, Loop, Run
from jaxtrain.run.runinfo import recorded_parts
from jaxtrain.train_step.state import TrainState
from jaxtrain.tuning.answer_pairs import AnswerPairs
from jaxtrain.tuning.environments.loading import environment_of
from jaxtrain.tuning.environments.protocol import Environment
from jaxtrain.tuning.remote_teacher import RemoteTeacher
from jaxtrain.tuning.rollouts import Rollouts
from jaxtrain.tuning.samplers import sampler_of
from jaxtrain.tuning.scorers import Scorers
from jaxtrain.tuning.teacher_scores import TeacherScores

FOLDER = "rollouts"  # of a workdir


def on_answers(run: Run, workdir: str | Path | None = None) -> "Rollouts":
    """Return answers of a run's own, as its data. `workdir`: where the answers of each step are kept."""
    c = run.config.rl
    tokenizer, chat = _words(run, workdir)
    folder = None if workdir is None else Path(workdir) / FOLDER
    began_with = _began_with(workdir)
    scorers = Scorers.of(run, tokenizer, began_with.get("reward_model", {}))
    teacher = (RemoteTeacher.of(run.config) if RemoteTeacher.is_meant(c.teacher) else
               TeacherScores.of(run, tokenizer, began_with.get("teacher_model", {})))
    ends = _ends(run, workdir, tokenizer)
    kind = AnswerPairs if run.config.preference.loss else Rollouts
    sampler = sampler_of(run, tokenizer, [*(chat.ends() if chat else []), *ends], folder and folder.parent)
    environment = environment_of(run.config) if c.environment else None
    tasks = _tasks(environment) if environment else []
    records = tasks if environment and c.prompts == ENVIRONMENT else read_prompts(c.prompts)
    return kind(run, records, scorers, tokenizer, folder, chat, ends, teacher, environment, sampler)


def _tasks(environment: Environment) -> list[JsonObject]:
    """Return the tasks that an environment brings, as records; one, if all that it depends on is the seed."""
    import jax

    found = [{**task, "prompt": task.get("prompt") or ""} for task in environment.tasks()]
    if jax.process_index():  # the first process asks it
        environment.end()
    return found or [{"prompt": ""}]


def _began_with(workdir: str | Path | None) -> JsonObject:
    """Return what the run in a workdir began with: the checkpoints of its reward model and of its teacher."""
    parts = (None if workdir is None else recorded_parts(workdir)) or {}
    return parts.get("data", {}).get("identity", {})


def _words(run: Run, workdir: str | Path | None) -> tuple[Tokenizer, Chat | None]:
    """Return the tokenizer and the chat template that the run has kept, or those of the model that it begins with."""
    source, _ = source_and_step(run.config.train.init_from)
    if workdir is not None and (Path(workdir) / "tokenizer").is_dir():
        source = Path(workdir)
        if not kept_template(source, {}):  # it began without one, and goes on so
            return tokenizer_of(source), None
    elif not run.config.train.init_from:
        return load_tokenizer(run.config.data.tokenizer), None
    tokenizer = tokenizer_of(source)
    try:
        chat = chat_of(source, sections_of(source) if (source / "config.json").is_file() else {}, tokenizer, "")
    except UserError:  # of a kind that has no template
        return tokenizer, None
    return tokenizer, chat if chat.source else None


def _ends(run: Run, workdir: str | Path | None, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that end a text of the published model that the run begins with, by generation_config.json.

    How that samples is left aside: answers are drawn as the objective expects them.
    """
    if not run.config.train.init_from:
        return []
    kept = workdir is not None and (Path(workdir) / published_files.FOLDER).is_dir()
    source = Path(workdir) if workdir is not None and kept else source_and_step(run.config.train.init_from)[0]
    return [end for end in ends_of(source) if end < min(tokenizer.vocab_size, run.config.model.vocabulary)]


def read_prompts(path: str) -> list[JsonObject]:
    """Return the records of a file of JSON lines, each with a "prompt"."""
    try:
        lines = read(Path(path), LARGE).decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("rl.prompts", f"{path} cannot be read ({error})", "give a file of JSON lines") from error
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
            raise UserError("rl.prompts", f"line {number} of {path} has no prompt",
                            'write lines such as {"prompt": "1+2=", "sum": 3}') from None
    if not found:
        raise UserError("rl.prompts", f"{path} has no prompts", 'write lines such as {"prompt": "1+2="}')
    return found


@dataclass(frozen=True)
class OwnAnswers(Extension):
    """A run that trains on its own answers (`rl.prompts`)."""

    answers: Rollouts | None = None  # of a run that is built
    planned = "jaxtrain.plan.answering:planned"

    def for_run(self, run: Run, workdir: Path | None) -> "OwnAnswers":
        """Return it with the answers of this run, unless it was given other data."""
        return OwnAnswers(on_answers(run, workdir)) if isinstance(run.data, Rollouts | None) else self

    def before_save(self, step: int, state: TrainState, loop: Loop) -> TrainState:
        """Have answers that are under way put on record, where they could not be made again."""
        if self.answers is not None:
            self.answers.before_save()
        return state

    @property
    def data(self) -> BatchSource | None:
        """The answers."""
        return self.answers

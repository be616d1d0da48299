"""The rules by which a speech model writes transcripts: the tokens before one, and those that it may not have.

Published models say them in generation_config.json, and older ones in config.json.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxtrain.config.speech.language_names import code_of
from jaxtrain.errors import UserError, nearest
from jaxtrain.files.bounded_files import user_json
from jaxtrain.hf import generation_keys

Keys = Mapping[str, Any]
CONFIG, GENERATION = "config.json", generation_keys.FILE
DETECTED = -1  # stands for the token of the language that is heard
_START, _END, _SUPPRESSED_FIRST = 50257, 50256, (220, 50256)  # in transformers, where config.json does not say


@dataclass(frozen=True)
class TranscriptRules:
    """The rules of one model. Languages are by their code, tasks by their name."""

    start: int
    end: int
    forced: tuple[int, ...] = ()  # tokens after `start`; DETECTED: that of the language
    languages: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, int] = field(default_factory=dict)
    no_times: int | None = None  # the token after which a transcript has no times; the next one is that of 0 seconds
    one_language: bool = False
    detects: bool = False  # whether the language is detected where none is given
    published: bool = True
    times: bool = False  # whether transcripts have times unless asked otherwise
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()  # tokens that no transcript begins with
    latest: int | None = None  # the largest time that a transcript may begin with, in steps of 0.02 seconds
    longest: int = 2**31  # the most tokens of a transcript
    not_applied: tuple[str, ...] = ()  # settings of transformers that are not known here, as KEY=VALUE

    @property
    def prefix(self) -> list[int]:
        """The tokens in front of every transcript that are the same for all, as training takes them."""
        if DETECTED in self.forced:
            return [self.start]
        return self._without_times([self.start, *self.forced])

    def prompt(self, prefix: Sequence[int], language: str = "", task: str = "", timestamps: bool = False) -> list[int]:
        """Return the tokens before a transcript, of which one may be DETECTED.

        Args:
            prefix: tokens that the model was trained with in front of transcripts.
            language: code, name or token; "": that of `prefix`, or the one that is heard.
            task: "transcribe" or "translate"; "": that of `prefix`, or what the model does by default.
            timestamps: whether the transcript has times.
        """
        spoken, done = (next((id for id in prefix if id in ids.values()), None) for ids in (self.languages, self.tasks))
        # Without the languages of a published model, transcripts begin with their own where model.prefix names none.
        named = language or task or (timestamps and not self.published and self.languages
                                     and self.no_times not in prefix)
        if not named:
            if len(prefix) == 1 and self.forced:
                prefix = [self.start, *self.forced]
            elif not timestamps:
                return list(prefix)
            tokens = [id for id in prefix if id != self.no_times]
        else:
            spoken = self._language(language) if language else spoken
            if spoken is None and self.detects:
                spoken = DETECTED
            if spoken is None and self.languages:
                raise UserError("--language", "the model knows several, and model.prefix names none of them",
                                "give one, such as --language=en")
            done = self._task(task) if task else self.tasks.get("transcribe") if done is None else done
            tokens = [id for id in (self.start, spoken, done) if id is not None]
        return tokens if timestamps else self._without_times(tokens)

    def _without_times(self, tokens: list[int]) -> list[int]:
        return tokens if self.no_times is None or tokens[-1] == self.no_times else [*tokens, self.no_times]

    def _language(self, language: str) -> int:
        if self.one_language:
            raise UserError("--language", "the model knows one language only", "leave it out")
        if (code := code_of(language)) not in self.languages:
            raise _unknown("language", language, self.languages)
        return self.languages[code]

    def _task(self, task: str) -> int:
        if self.one_language:
            raise UserError("--task", "the model transcribes one language only", "leave it out")
        if task not in self.tasks:
            raise _unknown("task", task, self.tasks)
        return self.tasks[task]


def _unknown(what: str, given: str, known: Mapping[str, int]) -> UserError:
    if not known:
        return UserError(f"--{what}", f"the model's tokenizer has no tokens of {what}s", "leave it out")
    return UserError(f"--{what}", f"{given!r} is not a {what} that the model knows", nearest(given, known) if len(
        known) < 4 else f"known: {', '.join(sorted(known))}")


def published_rules(given: Keys, folder: Path) -> TranscriptRules:
    """Return the rules of a published model.

    Args:
        given: what its config.json says.
        folder: that has its generation_config.json; without one, config.json says all there is, as for transformers.
    """
    said = user_json(folder / GENERATION, dict, "--config", "download it again")
    where, defaults = folder / (CONFIG if said is None else GENERATION), {"begin_suppress_tokens": _SUPPRESSED_FIRST}
    own: Keys = defaults | dict(given) if said is None else said

    def one(key: str) -> int | None:
        return next(iter(_ids(own, key, where, several=False)), None)

    def needed(key: str, plain: int) -> int:
        return next(iter([*_ids(own, key, where, False), *_ids(given, key, folder / CONFIG, False)]), plain)

    no_times, length = one("no_timestamps_token_id"), one("max_new_tokens") or (one("max_length") if said else None)
    rules = TranscriptRules(
        needed("decoder_start_token_id", _START), needed("eos_token_id", _END),
        languages=_table(own, "lang_to_id", where), tasks=_table(own, "task_to_id", where), no_times=no_times,
        one_language=own.get("is_multilingual") is False, detects=bool(own.get("lang_to_id")),
        times=own.get("return_timestamps") is True and no_times is not None,
        suppressed=_ids(own, "suppress_tokens", where), suppressed_first=_ids(own, "begin_suppress_tokens", where),
        latest=one("max_initial_timestamp_index"), longest=length or 2**31,
        not_applied=tuple(generation_keys.not_applied(own, generation_keys.OF_TRANSCRIPTS)))
    return _with_forced(rules, own, given, where)


def _ids(said: Keys, key: str, where: Path, several: bool = True) -> tuple[int, ...]:
    """Return the numbers that a key has; negative ones stand for none."""
    value = said.get(key)
    found = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    if any(type(id) is not int or id >= 2**31 for id in found) or (len(found) > 1 and not several):
        raise UserError(f"{where}", f"{key}={value!r} is not {'a list of numbers' if several else 'a number'}",
                        "download it again")
    return tuple(id for id in found if id >= 0)


def _table(said: Keys, key: str, where: Path) -> dict[str, int]:
    """Return tokens by their names without brackets."""
    found = said.get(key) or {}
    if not isinstance(found, dict) or any(type(id) is not int or not 0 <= id < 2**31 for id in found.values()):
        raise UserError(f"{where}", f"{key} does not give tokens their numbers", "download it again")
    return {f"{name}".removeprefix("<|").removesuffix("|>"): id for name, id in found.items()}


def _with_forced(rules: TranscriptRules, own: Keys, given: Keys, where: Path) -> TranscriptRules:
    """Return the rules with the tokens that follow the first one, where no language or task is asked for."""
    language, task = own.get("language"), own.get("task")
    if language or task:
        try:
            prompt = rules.prompt([rules.start], f"{language or ''}", f"{task or ''}", timestamps=True)
        except UserError as error:
            raise UserError(f"{where}", f"{error.key[2:]}: {error.reason}", error.fix) from None
        return replace(rules, forced=tuple(prompt[1:]))
    pairs = own.get("forced_decoder_ids")
    pairs = given.get("forced_decoder_ids") if pairs is None else pairs
    forced = []
    for n, pair in enumerate(pairs if isinstance(pairs, list) else [pairs] * (pairs is not None), 1):
        if not isinstance(pair, list) or len(pair) != 2 or pair[0] != n or not (
                (type(pair[1]) is int and 0 <= pair[1] < 2**31) or pair[1] is None):
            raise UserError(f"{where}", f"forced_decoder_ids={pairs!r} are not the tokens from the second one on",
                            "download it again, or remove the key")
        forced.append(pair[1])
    if rules.detects and (not forced or forced[0] is None):
        forced = [DETECTED, *forced[1:]]
    return replace(rules, forced=tuple(id for id in forced if id is not None))

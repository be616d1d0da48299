"""A trained speech model as transcribing needs it: with its tokenizer, the tokens before a transcript, and decoding."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.speech.published_speech import rules_of
from jaxtrain.config.speech.transcript_rules import DETECTED, GENERATION, TranscriptRules
from jaxtrain.errors import UserError, say
from jaxtrain.hub.folders.published_files import folder_of
from jaxtrain.hub.speech.transcript_windows import Segment, read_window

START, NO_TIMES, FIRST_TIME = "<|startoftranscript|>", "<|notimestamps|>", "<|0.00|>"
TASKS = ("transcribe", "translate")
LATEST = 50  # steps of 0.02 seconds: what transcripts begin with at the latest (arXiv 2212.04356)


@dataclass(frozen=True, eq=False)
class SpeechModel:
    """A model and how it transcribes.

    Args:
        c: its config.
        model: with its parameters.
        words: its tokenizer.
        rules: by which it writes transcripts.
        prompt: the tokens before every transcript; DETECTED among them: the language of each recording.
        first: the token of 0 seconds; 0: transcripts have no times.
        beams: how many transcripts are followed at once.
    """

    c: Any
    model: Any
    words: Any
    rules: TranscriptRules
    prompt: list[int]
    first: int = 0
    beams: int = 1

    @cached_property
    def decoding(self) -> Any:
        """The programs of decoding."""
        from jaxtrain.hub.speech.speech_decoding import SpeechDecoding, Timestamps

        rules, c = self.rules, self.c
        known = c.vocab_size if rules.published else known_tokens(self.words, c, self.first)
        silent, first = ([id for id in some if id < c.vocab_size] for some in (self.silent, rules.suppressed_first))
        return SpeechDecoding(self.model, c.end, known, silent, first,
                              Timestamps(self.first, c.end, rules.latest) if self.first else None)

    @property
    def silent(self) -> list[int]:
        """The tokens that no transcript has: those of a published model, and the one that stands for no times.

        That is one of the transcript where it does not follow `prompt`, and a published model is not kept from it.
        """
        no_times, asked = self.rules.no_times, not self.rules.published and self.rules.no_times in self.prompt
        return [*self.rules.suppressed, *([no_times] if no_times is not None and (self.first or asked) else ())]

    @cached_property
    def encoder(self) -> Any:
        """The programs of an encoder that attends by chunks."""
        from jaxtrain.hub.speech.live_encoder import LiveEncoder

        return LiveEncoder(self.model, self.c)

    @cached_property
    def timed(self) -> "SpeechModel":
        """The model for recordings of several windows: with times where a published one knows them, as transformers.

        Without times, such models often leave out most of a window that begins or ends within a sentence.
        """
        if self.first or not self.rules.published or self.rules.no_times is None:
            return self
        return replace(self, prompt=[id for id in self.prompt if id != self.rules.no_times],
                       first=self.rules.no_times + 1)

    @property
    def new(self) -> int:
        """The most tokens of a transcript."""
        return min(self.c.max_seq_len - len(self.prompt), self.rules.longest)

    def prompts(self, rows: int) -> np.ndarray:
        """Return the tokens before the transcripts of this many rows."""
        return np.array([self.prompt] * rows, np.int32)

    def prompt_for(self, window_MC: np.ndarray, valid_M: np.ndarray) -> list[int]:
        """Return the tokens before the transcripts of a recording, whose first window may have to tell the language."""
        if DETECTED not in self.prompt:
            return self.prompt
        spoken = self.decoding.most_likely(window_MC[None], valid_M[None] if self.c.mask_padding else None,
                                           [self.rules.start], sorted(self.rules.languages.values()))
        return [spoken if id == DETECTED else id for id in self.prompt]

    def said(self, tokens: np.ndarray) -> list[int]:
        """Return the tokens of a transcript without its end, and, where it has no times, without such."""
        kept = tokens != self.c.end
        if not self.first and self.rules.published and self.rules.no_times is not None:
            kept &= tokens <= self.rules.no_times
        return tokens[kept].tolist()

    def read(self, ids: list[int], at: int, size: int) -> tuple[list[Segment], int]:
        """Return the segments of a window of `size` frames, the first one `at`, and by how many frames to move on."""
        return read_window(ids, at, size, self.words, self.first)


def open_model(folder: str | Path, step: int | None = None, *, beams: int = 1, language: str = "", task: str = "",
               timestamps: bool = False) -> SpeechModel:
    """Return the model of a workdir or of a published folder; transcribe.transcribe says what the rest is."""
    from jaxtrain.config.modality_families import WhisperConfig
    from jaxtrain.hub import trained_model
    from jaxtrain.hub.trained_tokenizer import tokenizer_of

    words = tokenizer_of(folder)
    run, state = trained_model.load_model(folder, step=step)
    c = run.config.model
    assert isinstance(c, WhisperConfig)
    rules = rules_for(folder, c, words)
    timestamps = timestamps or rules.times
    prompt = rules.prompt(c.prefix, language, task, timestamps)
    if rules.not_applied:
        say(f"warning: {GENERATION} of {folder} says {', '.join(rules.not_applied)}, which transcribe does not apply")
    first = _first_time(rules, words) if timestamps else 0
    return SpeechModel(c, run.module(state), words, rules, prompt, first, beams)


def known_tokens(words: Any, c: Any, first: int) -> int:
    """Return how many tokens may be chosen: the tokenizer's, the end, and from `first` on, if not 0, times."""
    return max(words.vocab_size, c.end + 1, first and first + c.audio_positions + 1)


def rules_for(folder: str | Path, c: Any, words: Any) -> TranscriptRules:
    """Return the rules of the model in a folder: of the published one that it is or began with, or its tokenizer's."""
    own, source = own_rules(c, words), folder_of(folder)
    found = rules_of(source) if source else None
    if found is None or source is None or (found.start, found.end) != (c.prefix[0], c.end):  # or it has other tokens
        return own
    if wrong := [id for id in (*found.forced, *found.languages.values(), *found.tasks.values(), found.no_times or 0)
                 if id >= c.vocab_size]:
        raise UserError(f"{source / GENERATION}", f"{wrong[0]} is not a token below vocab_size={c.vocab_size}",
                        "bring the file that belongs to the model")
    if not found.languages and not found.one_language:
        found = replace(found, languages=own.languages, tasks=found.tasks or own.tasks,
                        no_times=own.no_times if found.no_times is None else found.no_times)
    return found


def own_rules(c: Any, words: Any) -> TranscriptRules:
    """Return the rules of a model whose tokenizer alone tells what tokens mean; `words`: that, None without one."""
    known = {} if words is None else words.specials
    named = {name[2:-2]: id for name, id in known.items() if name.startswith("<|")}
    silent = [known[START]] if START in known else []
    return TranscriptRules(
        c.prefix[0], c.end, languages={name: id for name, id in named.items() if len(name) in (2, 3)
                                       and name.isalpha() and name.islower()},
        tasks={name: named[name] for name in TASKS if name in named}, no_times=known.get(NO_TIMES), published=False,
        suppressed=tuple(silent), latest=LATEST)


def prefix_note(folder: Path, c: Any) -> str:
    """Return a warning for who trains a published model of several languages and names none; "" otherwise."""
    rules = rules_of(folder)
    if rules is None or not rules.detects or list(c.prefix) != [rules.start]:
        return ""
    names, language = {id: name for table in (rules.languages, rules.tasks) for name, id in table.items()}, min(
        rules.languages)
    ids = rules.prompt(c.prefix, language)
    said = "".join(f"<|{names[id]}|>" if id in names else NO_TIMES for id in ids[1:])
    return (f"warning: the model in {folder} knows several languages, and model.prefix names none: give one, such as "
            f"--config.model.prefix={ids}, or begin transcripts with tokens such as {said} (prepare_sequences "
            "--parse_special_tokens)")


def _first_time(rules: TranscriptRules, words: Any) -> int:
    return time_token(words) if rules.no_times is None or not rules.published else rules.no_times + 1


def time_token(words: Any) -> int:
    """Return the token of 0 seconds."""
    if FIRST_TIME in words.specials:
        return words.specials[FIRST_TIME]
    if NO_TIMES in words.specials:  # published tokenizers may leave them out of what they list
        return words.specials[NO_TIMES] + 1
    raise UserError("--timestamps", "the model's tokenizer has no tokens of times", "leave it out")

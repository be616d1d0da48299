"""A trained speech model as transcribing needs it: with its tokenizer, the tokens before a transcript, and decoding."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.errors import UserError, nearest
from jaxtrain.hub.speech.transcript_windows import Segment, read_window

START, NO_TIMES, FIRST_TIME = "<|startoftranscript|>", "<|notimestamps|>", "<|0.00|>"


@dataclass(frozen=True, eq=False)
class SpeechModel:
    """A model and how it transcribes.

    Args:
        c: its config.
        model: with its parameters.
        words: its tokenizer.
        prompt: the tokens before every transcript.
        first: the token of 0 seconds; 0: transcripts have no times.
        beams: how many transcripts are followed at once.
    """

    c: Any
    model: Any
    words: Any
    prompt: list[int]
    first: int = 0
    beams: int = 1

    @cached_property
    def decoding(self) -> Any:
        """The programs of decoding."""
        from jaxtrain.hub.speech.speech_decoding import SpeechDecoding, Timestamps

        silent = [id for id in map(self.words.specials.get, (NO_TIMES, START)) if id is not None]
        return SpeechDecoding(self.model, self.c.end, known_tokens(self.words, self.c, self.first), silent,
                              Timestamps(self.first, self.c.end) if self.first else None)

    @cached_property
    def encoder(self) -> Any:
        """The programs of an encoder that attends by chunks."""
        from jaxtrain.hub.speech.live_encoder import LiveEncoder

        return LiveEncoder(self.model, self.c)

    @property
    def new(self) -> int:
        """The most tokens of a transcript."""
        return self.c.max_seq_len - len(self.prompt)

    def prompts(self, rows: int) -> np.ndarray:
        """Return the tokens before the transcripts of so many rows."""
        return np.array([self.prompt] * rows, np.int32)

    def said(self, tokens: np.ndarray) -> list[int]:
        """Return the tokens of a transcript without its end."""
        return tokens[tokens != self.c.end].tolist()

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
    prompt = prompt_of(words, c, language, task, timestamps)
    return SpeechModel(c, run.module(state), words, prompt, time_token(words) if timestamps else 0, beams)


def known_tokens(words: Any, c: Any, first: int) -> int:
    """Return how many tokens may be chosen: the tokenizer's, the end, and from `first` on, if not 0, times."""
    return max(words.vocab_size, c.end + 1, first and first + c.audio_positions + 1)


def prompt_of(words: Any, c: Any, language: str, task: str, timestamps: bool) -> list[int]:
    """Return the tokens before a transcript: those of the model, with this language, task and timestamps in place."""
    known = words.specials
    if not language and not task and not timestamps:
        return list(c.prefix)
    names = {id: token for token, id in known.items()}
    given = [names.get(id, "") for id in c.prefix]
    before = next((name for name in given if len(name) in (6, 7) and name.startswith("<|")), "")
    if not language and not before and "<|en|>" in known:
        raise UserError("--language", "the model knows several, and model.prefix names none of them",
                        "give one, such as --language=en")
    tokens = [START, f"<|{language}|>" if language else before, f"<|{task or 'transcribe'}|>"]
    tokens = [token for token in (*tokens, "" if timestamps else NO_TIMES) if token]
    for token in tokens:
        if token not in known:
            flag = "--language" if token == f"<|{language}|>" else "--task" if token == f"<|{task}|>" else "WORKDIR"
            raise UserError(flag, f"the tokenizer has no token {token}", nearest(token, known))
    return [known[token] for token in tokens]


def time_token(words: Any) -> int:
    """Return the token of 0 seconds."""
    if FIRST_TIME in words.specials:
        return words.specials[FIRST_TIME]
    if NO_TIMES in words.specials:  # published tokenizers may leave them out of what they list
        return words.specials[NO_TIMES] + 1
    raise UserError("--timestamps", "the model's tokenizer has no tokens of times", "leave it out")

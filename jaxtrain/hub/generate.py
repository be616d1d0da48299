"""Continue prompts with a model: one record per prompt, generated in batches on the mesh that the model lives on."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.base import arguments
from jaxtrain.data.tokenizers.tokenizer import Tokenizer, encode_documents, load_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.hub.adapters import stacked_adapters
from jaxtrain.hub.batching.continuations import Generated
from jaxtrain.hub.batching.sampler import Sampler
from jaxtrain.hub.batching.texts import keys
from jaxtrain.hub.folders.generation_config import ends_of
from jaxtrain.hub.sampling import Sampling, Tempered
from jaxtrain.hub.trained_tokenizer import tokenizer_of

if TYPE_CHECKING:
    from jaxtrain.run import Run
    from jaxtrain.train_step.state import TrainState

Prompt = str | Sequence[int]
CHUNK = 32  # tokens between looks for stop strings, which are found on the host


def generate(run: "Run", state: "TrainState", prompts: Sequence[Prompt], *, max_new_tokens: int = 128,
             temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
             repetition_penalty: float = 1.0, stop: Sequence[str | int] = (), ignore_end: bool = False,
             keep_stop: bool = False, seed: int = 0, logprobs: bool = False, tempered: bool = False,
             batch_size: int = 64, tokenizer: Tokenizer | str | Path = "", adapters: Sequence[str | None] | None = None,
             drawn: Sequence[tuple[int, int]] | None = None) -> list[Generated]:
    """Continue prompts with a key-value cache; return a record for each.

    The continuation depends on `seed` and on the prompt's position among the prompts, not on the other prompts, the
    size of batches or the mesh.

    Args:
        run: the run whose mesh is used: rows are split over every axis except `tensor`, heads over `tensor`.
        state: the state whose parameters are used.
        prompts: texts, or lists of token ids.
        max_new_tokens: the most tokens to generate, limited by the room in `model.max_seq_len`.
        temperature: 0 always picks the most probable token.
        top_k: sample from this many of the most probable tokens; 0: from all.
        top_p: sample from the smallest set of tokens whose probabilities add up to at least this.
        min_p: sample from tokens at least this many times as probable as the most probable one.
        repetition_penalty: above 1, tokens already in the prompt or the text become less likely.
        stop: texts or token ids before which a text ends. So do the tokenizer's end of a document, and the tokens that
            generation_config.json names if `tokenizer` is the folder of a model.
        ignore_end: continue after the end of a document.
        keep_stop: a stop text's own tokens count, to the one with its end; the record's text is still without it.
        seed: another seed gives another text.
        logprobs: also return the log-probability of each token.
        tempered: those of the model at the temperature at which tokens are drawn, not at 1.
        batch_size: the number of prompts continued at once; others take the places of finished ones.
        tokenizer: a tokenizer, or the folder of one, of a run or of a published model; by default that of the
            run's data. Without a tokenizer, if all prompts are token ids, the records have no text.
        adapters: the name of an adapter for each prompt, among those that `jt.load_model` or `jt.with_adapters` loaded;
            None: the base model, which is the default for all prompts.
        drawn: for each prompt the position by which it is seeded, and how many tokens at its end were drawn so before:
            what follows is what would have followed them. By default its own position, and none.
    """
    sampling = (Tempered if tempered else Sampling)(temperature, top_k, top_p, min_p, repetition_penalty)
    check(prompts, max_new_tokens, stop, batch_size, seed)
    arguments.is_run(run)
    if run.own:
        raise UserError("run", "a model of your own has no key-value cache", "generate with a model of the config")
    if not run.config.model.text:
        raise UserError("run", f"{run.config.model.name} is not a decoder of text",
                        "evaluate it with run.evaluate(state)")
    run.sharded.check_devices()
    strings = [one for one in stop if isinstance(one, str)]
    words: Tokenizer | None = None
    if tokenizer or strings or any(isinstance(prompt, str) for prompt in prompts):
        words = _opened(tokenizer) if tokenizer else run.corpus.tokenizer
    ends = [one for one in stop if not isinstance(one, str)] + ([words.eod] if words and not ignore_end else [])
    if isinstance(tokenizer, str | Path) and tokenizer and not ignore_end:
        ends += ends_of(tokenizer)
    ids = _encoded(run, prompts, words)
    chosen = stacked_adapters.chosen(state, len(ids), adapters)
    sampler = Sampler(run, state, sampling=sampling, rows=min(batch_size, max(1, len(ids))), ends=ends,
                      strings=strings, words=words, logprobs=logprobs, chunk=CHUNK, keep_stop=keep_stop)
    drawn = drawn or [(number, 0) for number in range(len(ids))]
    for number, (prompt, key) in enumerate(zip(ids, keys(seed, drawn), strict=True)):
        sampler.submit(prompt, min(max_new_tokens, run.config.model.max_seq_len - len(prompt)), key,
                       None if chosen is None else chosen[number])
    while sampler.busy:
        sampler.step()
    return [record for _, record in sorted(sampler.collect().items())]


def sample(run: "Run", state: "TrainState", prompt: str = "", length: int = 200, *, temperature: float = 0.8,
           seed: int = 0, tokenizer: str | Path = "") -> str:
    """Return `prompt` continued by at most `length` tokens, as many as `data.seq_len` has room for.

    At `temperature=0` each token is the most probable one. `tokenizer` is the folder of one that was kept, such as
    "WORKDIR/tokenizer", for where the data is no longer there.
    """
    arguments.is_run(run)
    words = load_tokenizer(f"{tokenizer}") if tokenizer else run.corpus.tokenizer
    # A document's first token has no predecessor in training, so an empty prompt starts behind a line's end.
    begin, = encode_documents([(prompt or "\n").encode()], words)
    begin, seq_len = begin[-(run.config.data.seq_len - 1):].tolist(), run.config.data.seq_len
    found, = generate(run, state, [begin], max_new_tokens=min(length, seq_len - len(begin)), temperature=temperature,
                      ignore_end=True, seed=seed, tokenizer=tokenizer)
    return words.decode([*(begin if prompt else []), *found.tokens])


def _opened(tokenizer: Tokenizer | str | Path) -> Tokenizer:
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    return tokenizer_of(tokenizer) if (Path(tokenizer) / "config.json").is_file() else load_tokenizer(f"{tokenizer}")


def _encoded(run: "Run", prompts: Sequence[Prompt], words: Tokenizer | None) -> list[list[int]]:
    """Return the tokens of each prompt; refuses one that the model cannot continue."""
    c, found = run.config.model, []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            assert words is not None
            try:
                prompt, = encode_documents([prompt.encode()], words)
            except UnicodeEncodeError as error:
                raise UserError(f"prompts[{number}]", "it is not text: half of a character",
                                "give text in UTF-8") from error
        ids = [int(id) for id in prompt]
        if not ids:
            raise UserError(f"prompts[{number}]", "it has no tokens", "give a text to continue, such as a line's end")
        if len(ids) >= c.max_seq_len:
            raise UserError(f"prompts[{number}]", f"its {len(ids)} tokens leave no room in model.max_seq_len="
                            f"{c.max_seq_len}", f"give at most {c.max_seq_len - 1}")
        if wrong := next((id for id in ids if not 0 <= id < c.vocabulary), None):
            raise UserError(f"prompts[{number}]", f"token {wrong} is not below model.vocab_size={c.vocabulary}",
                            "use the tokenizer with which the model was trained")
        found.append(ids)
    return found


def check(prompts: Sequence[Prompt], max_new_tokens: int, stop: Sequence[str | int], batch_size: int,
          seed: int) -> None:
    """Refuse what no model can do."""
    if isinstance(prompts, str):
        raise UserError("prompts", "it is a single text", "give a list of texts")
    if isinstance(stop, str):
        raise UserError("stop", "it is a single text", "give a list of texts or token ids")
    for key, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise UserError(key, f"{value} is below 1", "give 1 or more")
    if not 0 <= seed < 2**32:
        raise UserError("seed", f"{seed} is out of range", "give 0 or more, and less than 2^32")
    if wrong := [one for one in stop if not isinstance(one, str) and not 0 <= one < 2**31]:
        raise UserError("stop", f"{wrong[0]} is not a token", "give texts or token ids")
    if "" in stop:
        raise UserError("stop", "an empty text matches everywhere", "leave it out")

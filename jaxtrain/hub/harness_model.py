"""A model of ours as lm-evaluation-harness asks models: for log-probabilities of texts, and for continuations."""

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.chat.templates import Chat
from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.errors import UserError, install_extra, say
from jaxtrain.hub.adapters.stacked_adapters import chosen
from jaxtrain.hub.folders import generation_config, published_files
from jaxtrain.hub.generate import generate
from jaxtrain.hub.sampling import Sampling
from jaxtrain.hub.scoring import score
from jaxtrain.hub.trained_tokenizer import prompt_ids
from jaxtrain.train_step import partition

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as missing:
    raise UserError("--tasks", f"they need the package lm_eval ({missing})", install_extra("eval")) from missing

if TYPE_CHECKING:
    from jaxtrain.run import Run
    from jaxtrain.train_step.state import TrainState

MOST_NEW_TOKENS = 256  # where a task does not say how many it wants, as the harness has it for other models

# Of what a task says of continuations: what is read here, and what has no effect on them.
_READ = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
_WITHOUT_EFFECT = {"use_cache", "pad_token_id", "max_length", "num_return_sequences"}


class HarnessModel(TemplateLM):
    """A run's model with the parameters of a state, and the adapter of one name if it has stacked ones.

    `folder` is that of the run or of the published model, whose files say how it is prompted and generated with.
    """

    def __init__(self, run: "Run", state: "TrainState", tokenizer: Tokenizer, *, chat: Chat | None = None,
                 batch_size: int = 64, seed: int = 0, adapter: str | None = None, folder: str | Path | None = None):
        super().__init__()
        self.prefix = tokenizer.bos if folder is None else published_files.prefix_of(folder, tokenizer)
        self.said = None if folder is None else generation_config.said_of(folder)
        self.ends = [] if folder is None else generation_config.ends_of(folder)
        self.run, self.state, self.words, self.chat = run, state, tokenizer, chat
        self.most, self.seed, self.adapter = batch_size, seed, adapter
        self.params = partition.without(state.all_params, run.objective.frozen_axes)  # of the model alone

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.words.eod

    @property
    def prefix_token_id(self) -> int:
        """The token that stands in front of a text without a context."""
        return self.words.eod if self.prefix is None else self.prefix

    @property
    def max_length(self) -> int:
        """The longest text that the model takes."""
        return self.run.config.model.max_seq_len

    @property
    def tokenizer_name(self) -> str:
        """The name that distinguishes prompts of different tokenizers and chat templates."""
        return f"{self.words.name}-{self.words.fingerprint}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the chat template, for the record of results."""
        return self.chat.source if self.chat and chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text."""
        if self.chat is None:
            raise UserError("--chat", "it was not asked for", "add --chat")
        return self.chat.text(chat_history, add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text; special tokens in it are such, as a chat template writes them."""
        return prompt_ids(self.words, string, begin=add_special_tokens is not False)

    def _loglikelihood_tokens(self, requests, **kwargs: Any) -> list[tuple[float, bool]]:
        found = score(self.run, self.params, [(given, scored) for _, given, scored in requests],
                      batch_size=self.most, chosen=chosen(self.state, len(requests), [self.adapter] * len(requests)))
        return [(float(one.logprobs.sum(dtype=float)), one.greedy) for one in found]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of whole texts, in windows that overlap by one token."""
        windows = [[make_disjoint_window(window) for window in get_rolling_token_windows(
            token_list=self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length,
            context_len=1)] for (text,) in (request.args for request in requests)]
        found = iter(self._loglikelihood_tokens([(None, *window) for each in windows for window in each]))
        return [sum(next(found)[0] for _ in each) for each in windows]

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to the texts that end it."""
        alike = defaultdict(list)  # requests by how they are to be continued
        for number, (context, how) in enumerate(request.args for request in requests):
            alike[json.dumps(how, sort_keys=True, default=str)].append((number, context, how))
        found: dict[int, str] = {}
        for group in alike.values():
            how: dict[str, Any] = {**normalize_gen_kwargs(group[0][2], MOST_NEW_TOKENS)}
            room = self.max_length - how["max_gen_toks"]
            if room < 1:
                raise UserError("max_gen_toks", f"{how['max_gen_toks']} leaves no room for a prompt in "
                                f"model.max_seq_len={self.max_length}", "give --gen_kwargs=max_gen_toks=N")
            prompts = [self.tok_encode(context)[-room:] or [self.prefix_token_id] for _, context, _ in group]
            records = generate(self.run, self.state, prompts, max_new_tokens=how["max_gen_toks"],
                               **asdict(self._sampling(how)), stop=self._stops(how["until"]),
                               seed=self.seed, batch_size=self.most, tokenizer=self.words,
                               adapters=[self.adapter] * len(prompts))
            found |= {number: one.text for (number, *_), one in zip(group, records, strict=True)}
        return [found[number] for number in range(len(requests))]

    def _sampling(self, how: JsonObject) -> Sampling:
        """Return how tokens are chosen: as the task says, else as the model's generation_config.json does."""
        if ignored := [f"{key}={value!r}" for key, value in how.items() if key not in _READ | _WITHOUT_EFFECT]:
            say(f"warning: a task asks for {', '.join(ignored)} in generation_kwargs, which is not applied")
        given = {key: how.get(key) for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
        if not how.get("do_sample"):
            given |= dict.fromkeys(("top_k", "top_p", "min_p")) | {"temperature": 0.0}
        said = (self.said or {}) | {"do_sample": bool(how.get("do_sample"))}
        return generation_config.sampling_of(said, given)

    def _stops(self, until: list[str] | str) -> list[str | int]:
        """Return what ends a continuation. Special tokens among a task's texts end it as tokens: texts lack them."""
        texts = [text for text in ([until] if isinstance(until, str) else until) if text]
        tokens = [self.words.specials[text] for text in texts if text in self.words.specials]
        return [*texts, *dict.fromkeys([*tokens, *self.ends, *(self.chat.ends() if self.chat else [])])]

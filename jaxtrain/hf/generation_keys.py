"""The settings of generation_config.json that transformers has and jaxtrain does not apply."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.base.annotations import Json, JsonMapping

FILE = "generation_config.json"
# Settings that change what is generated, and the values at which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "penalty_alpha": (0,), "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,), "min_new_tokens": (0,), "encoder_repetition_penalty": (1,), "bad_words_ids": ([],),
    "sequence_bias": ({}, []), "exponential_decay_length_penalty": (), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "guidance_scale": (1,)}
_OF_TEXTS: dict[str, tuple[Any, ...]] = {
    "num_beam_groups": (1,), "typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "force_words_ids": ([],),
    "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "dola_layers": (), "watermarking_config": (), "top_h": (),
    "remove_invalid_values": (False,)}
_OF_TRANSCRIPTS: dict[str, tuple[Any, ...]] = {
    "do_sample": (False,), "repetition_penalty": (1,), "condition_on_prev_tokens": (False,),
    "compression_ratio_threshold": (), "logprob_threshold": (), "no_speech_threshold": ()}
OF_TEXTS, OF_TRANSCRIPTS = _NEUTRAL | _OF_TEXTS, _NEUTRAL | _OF_TRANSCRIPTS


def not_applied(said: JsonMapping, neutral: Mapping[str, tuple[Json, ...]]) -> list[str]:
    """Return the settings that change what is generated and are not applied here, as KEY=VALUE.

    Args:
        said: what the file says.
        neutral: OF_TEXTS or OF_TRANSCRIPTS.
    """
    return [f"{key}={value!r}" for key, plain in neutral.items()
            if (value := said.get(key)) is not None and value not in plain]

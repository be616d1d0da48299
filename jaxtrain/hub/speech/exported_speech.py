"""The files of an exported speech model that say how its transcripts are written and what audio it reads.

A model that began with a published one keeps what that says. Otherwise its tokenizer and its prefix say it.
"""

from pathlib import Path
from typing import Any

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.config.modality_families import WhisperConfig
from jaxtrain.config.speech.published_speech import PREPROCESSOR, frames_of
from jaxtrain.config.speech.transcript_rules import CONFIG, GENERATION, TranscriptRules
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import user_json
from jaxtrain.hub.folders.published_files import folder_of
from jaxtrain.hub.speech.speech_model import own_rules, rules_for

_KEPT = ("forced_decoder_ids", "suppress_tokens", "begin_suppress_tokens", "pad_token_id", "bos_token_id")  # of config


def write(workdir: Path, folder: Path, c: WhisperConfig, words: Any, described: JsonObject) -> None:
    """Write generation_config.json and preprocessor_config.json, and complete what config.json is to say.

    Args:
        workdir: of the run.
        folder: to write them into.
        c: the config of the model.
        words: its tokenizer; None: it is not known.
        described: what config.json is to say, which is added to.
    """
    rules = rules_for(workdir, c, words)
    base = folder_of(workdir) if rules.published else None
    if base is not None:
        config = user_json(base / CONFIG, dict, f"{base}", "copy it again") or {}
        described |= {key: config[key] for key in _KEPT if key in config}
        said = user_json(base / GENERATION, dict, f"{base}", "copy it again") or {}
    else:
        said = _said(own_rules(c, words), c, words)
    if rules.prefix != c.prefix:  # it has been trained with other tokens in front of all transcripts
        said = {key: value for key, value in said.items() if key not in ("language", "task")}
        said["forced_decoder_ids"] = [[n, id] for n, id in enumerate(c.prefix) if n] or None
    if said:
        atomic_files.write_json(folder / GENERATION, said)
    atomic_files.write_json(folder / PREPROCESSOR, frames_of(c.mels, c.audio_positions) if base is None else user_json(
        base / PREPROCESSOR, dict, f"{base}", "copy it again") or frames_of(c.mels, c.audio_positions))


def _said(rules: TranscriptRules, c: WhisperConfig, words: Any) -> JsonMapping:
    """Return what generation_config.json says of a model that did not begin with a published one."""
    bos = None if words is None else words.bos
    said: dict[str, Any] = {
        "bos_token_id": c.prefix[0] if bos is None else bos, "eos_token_id": c.end, "pad_token_id": c.end,
        "decoder_start_token_id": c.prefix[0], "max_length": c.max_seq_len, "return_timestamps": False,
        "suppress_tokens": list(rules.suppressed),
        "begin_suppress_tokens": None}
    if len(c.prefix) == 1:  # transcripts begin with the other tokens, or there are none, so that nothing is to be added
        return said
    several = len(rules.languages) > 1 and not {*c.prefix}.isdisjoint(rules.languages.values())
    if rules.no_times is not None:
        said |= {"no_timestamps_token_id": rules.no_times, "max_initial_timestamp_index": rules.latest}
    if several:
        said |= {"lang_to_id": {f"<|{name}|>": id for name, id in rules.languages.items()},
                 "task_to_id": dict(rules.tasks)}
    return said | {"is_multilingual": several}

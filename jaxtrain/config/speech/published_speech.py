"""The keys of a published Whisper that are not the sizes of its layers: its tokens, and the audio that it reads."""

from pathlib import Path
from typing import Any

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.config.speech.transcript_rules import CONFIG, TranscriptRules, published_rules
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import user_json

Keys = dict[str, Any]
PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
# What jaxtrain's frames are made by (data/prepare_sequences/audio.py), in the names of transformers' extractor.
_FRAMES = {"sampling_rate": 16_000, "hop_length": 160, "n_fft": 400, "padding_value": 0, "dither": 0,
           "padding_side": "right"}
_SECOND = 100  # frames
_SIZES = ("max_target_positions", "max_source_positions", "num_mel_bins")


def section(given: JsonMapping, folder: Path) -> Keys:
    """Return the keys of the `model` section that are not the sizes of layers.

    Args:
        given: what config.json says.
        folder: that it is in.
    """
    for key in _SIZES:
        if key in given and (type(given[key]) is not int or given[key] < 1):
            raise UserError(f"{folder / CONFIG}", f"{key}={given[key]!r} is not a size that a model has",
                            "download it again")
    _check_frames(given, folder)
    rules = published_rules(given, folder)
    return {"prefix": rules.prefix, "end": rules.end}


def _check_frames(given: JsonMapping, folder: Path) -> None:
    """Refuse a model whose audio is preprocessed otherwise than by jaxtrain."""
    path, fix = folder / PREPROCESSOR, "bring the file that belongs to the model, or leave it out"
    said = user_json(path, dict, "--config", fix)
    if said is None:  # transformers 5 writes the extractor and the tokenizer's settings into one file
        path = folder / PROCESSOR
        said = (user_json(path, dict, "--config", fix) or {}).get("feature_extractor")
    if not isinstance(said, dict):
        return
    mels, positions = given.get("num_mel_bins", 80), given.get("max_source_positions", 1500)
    wanted = frames_of(mels, positions)
    plain = {"feature_size": 80, "chunk_length": 30}  # in transformers, where the file does not say
    for key, value in wanted.items():
        if (found := said.get(key, plain.get(key, value))) != value:
            why = {"feature_size": "num_mel_bins", "chunk_length": "max_source_positions"}.get(key)
            raise UserError(f"{path}", f"{key}={found!r} cannot be expressed: " + (
                f"{why} of {CONFIG} asks for {value:g}" if why else f"only {value!r} can"), fix)


def frames_of(mels: int, positions: int) -> Keys:
    """Return what preprocessor_config.json says of frames of this many bands, two for each position of the encoder."""
    seconds = positions * 2 / _SECOND
    return _FRAMES | {"feature_size": mels, "chunk_length": int(seconds) if seconds.is_integer() else seconds,
                      "feature_extractor_type": "WhisperFeatureExtractor"}


def rules_of(folder: Path) -> TranscriptRules | None:
    """Return the rules of the published model whose small files are in a folder; None without any."""
    given = user_json(folder / CONFIG, dict, f"{folder / CONFIG}", "copy it again")
    if given is None or given.get("model_type") != "whisper":
        return None
    return published_rules(given, folder)

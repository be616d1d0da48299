"""Write tests/hub/speech/whisper_truth.json: what transformers computes with a tiny Whisper, and its normaliser.

    python -m tests.hub.speech.whisper_truth

It needs torch and transformers; the tests need neither.
"""

import json
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.models.whisper import tokenization_whisper
from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

from tests.hub import published
from tests.hub.speech import tiny_whisper as tiny

TO = Path(__file__).with_suffix(".json")
SPELLINGS = {"colour": "color", "centre": "center", "grey": "gray"}


def main() -> None:
    model = WhisperForConditionalGeneration(WhisperConfig(**tiny.CONFIG)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.from_numpy(published.weight(name, tuple(weight.shape))))
        out = model(input_features=torch.from_numpy(tiny.FEATURES.transpose(0, 2, 1)),
                    decoder_input_ids=torch.from_numpy(tiny.TOKENS).long())
    mels = {}
    for bands in (80, 128):
        extractor = WhisperFeatureExtractor(feature_size=bands, chunk_length=1)
        mels[str(bands)] = published.projections("mels", extractor(
            tiny.SAMPLES, sampling_rate=16_000, return_tensors="np").input_features[0].T)
    english, basic = EnglishTextNormalizer(SPELLINGS), BasicTextNormalizer()
    found = {"shapes": {name: list(weight.shape) for name, weight in model.named_parameters()},
             "memory": published.projections("memory", out.encoder_last_hidden_state.numpy()),
             "logits": published.projections("logits", out.logits.numpy()), "mels": mels, "spellings": SPELLINGS,
             "sentences": [[text, english(text), basic(text)] for text in tiny.SENTENCES],
             "languages": tokenization_whisper.TO_LANGUAGE_CODE, "transcripts": transcripts(), "long": long(),
             "speaker": {name: list(weight.shape) for name, weight in speaker("none").named_parameters()}}
    TO.write_text(json.dumps(found, ensure_ascii=False) + "\n")


def speaker(name: str) -> WhisperForConditionalGeneration:
    """Return the tiny model that writes transcripts, as transformers loads it from a folder."""
    model = WhisperForConditionalGeneration(WhisperConfig(**tiny.SPEAKER)).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.copy_(torch.from_numpy(tiny.loud(key, published.weight(key, tuple(weight.shape)))))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        (Path(folder) / "generation_config.json").unlink()
        if (said := tiny.GENERATIONS[name]) is not None:
            (Path(folder) / "generation_config.json").write_text(json.dumps(said))
        return WhisperForConditionalGeneration.from_pretrained(folder).eval()


def transcripts() -> list[dict]:
    """Return the tokens before each transcript, and those of it, by the cases of tiny_whisper.CASES."""
    found = []
    for name, language, task, timestamps in tiny.CASES:
        model, prompts = speaker(name), []
        inner = model._retrieve_init_tokens
        model._retrieve_init_tokens = lambda *args, inner=inner, to=prompts, **keys: to.append(
            inner(*args, **keys)) or to[-1]
        tokens = model.generate(torch.from_numpy(tiny.FEATURES.transpose(0, 2, 1)), return_timestamps=timestamps,
                                language=language or None, task=task or None, force_unique_generate_call=True)
        prompt = prompts[0].tolist()
        found.append({"prompts": prompt, "tokens": [
            [token for token in row[len(prompt[0]):] if token != tiny.END] for row in tokens.tolist()]})
    return found


def long() -> list[list[int]]:
    """Return the tokens of the segments of a recording of several windows, without times."""
    out = speaker("several").generate(torch.from_numpy(tiny.LONG.transpose(0, 2, 1)), return_timestamps=True,
                                      language="de", return_segments=True)
    return [kept for one in out["segments"][0]
            if (kept := [token for token in one["tokens"].tolist() if token < tiny.NO_TIMES])]


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    warnings.simplefilter("ignore")
    main()

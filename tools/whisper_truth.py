"""Write tests/hub/speech/whisper_truth.json: what transformers computes with a tiny Whisper, and its normaliser.

    python tools/whisper_truth.py

It needs torch and transformers; the tests need neither.
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

from tests.hub import published
from tests.hub.speech import tiny_whisper as tiny

TO = Path(__file__).parents[1] / "tests/hub/speech/whisper_truth.json"
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
             "sentences": [[text, english(text), basic(text)] for text in tiny.SENTENCES]}
    TO.write_text(json.dumps(found, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    main()

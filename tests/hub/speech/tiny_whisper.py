"""A tiny Whisper, what it hears, and sentences whose normal form is known: for the truth and for the tests."""

import numpy as np

CONFIG = {"vocab_size": 24, "num_mel_bins": 6, "d_model": 16, "encoder_layers": 3, "decoder_layers": 2,
          "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20,
          "max_source_positions": 10, "max_target_positions": 12, "pad_token_id": 0, "bos_token_id": 1,
          "eos_token_id": 2, "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None}
FEATURES = np.random.default_rng(7).normal(size=(2, 20, 6)).astype(np.float32)
TOKENS = np.random.default_rng(8).integers(0, 24, (2, 9)).astype(np.int32)
SAMPLES = (np.sin(np.arange(16_000) * 0.2) * np.linspace(0, 0.5, 16_000)
           + np.random.default_rng(9).normal(0, 0.01, 16_000)).astype(np.float32)
SENTENCES = [
    "Hello, World! [music] It's (laughs) uh a test.",
    "I won't go; can't you? He's been there, they'd gone, she's got it.",
    "Mr. Smith and Dr. Jones met St. Peter at 5 o'clock.",
    "one hundred and twenty three",
    "nineteen eighty four",
    "twenty twenty",
    "I have ten thousand dollars and fifty cents.",
    "two and a half million people",
    "three point one four",
    "the twenty first of march",
    "in the nineteen thirties",
    "double seven and triple o",
    "one oh one dalmatians",
    "minus five degrees",
    "fifty percent of the time, per cent",
    "$1,000,000 and 20%",
    "£3.50 or 5 euros",
    "it costs two dollars",
    "the one",
    "ones and zeros",
    "one two three four five",
    "a hundred and one",
    "twenty-five",
    "five hundred thousand two hundred and twelve",
    "the colour of the centre was grey",
    "Café naïve Straße Ærø",
    "We're gonna go, y'all; I'ma wanna gotta",
    "I've I'm you'll they'd don't",
    "second place in the third race on the 4th of july 1st",
    "five million three hundred thousand and four",
    "one thousand nine hundred ninety nine",
    "sixty four thousand dollar question",
    "point taken",
    "and then five and six",
    "1.5 million dollars",
    "100 200",
    "10 percent plus five",
    "seven eleven",
    "thirty second",
    "two thousand and eight",
    "zero point five",
    'he said "hi" -- no... really?!',
    "e-mail re-elect co-operate",
    "5th avenue and 42nd street",
    "a.m. p.m. U.S.A.",
    "fifty first dates",
    "one and a half hours, half past nine",
    "three hundredths, two thirds, five sixths",
    "nine ninths six sixes hundreds of thousands",
    "three dollars and twenty five cents",
    "0.5 cents, 25 cents",
    "ten million and one",
    "fourteen fifteen sixteen",
    "covid nineteen b2b mp3",
    "twelve o'clock",
    "Mmm hmm, uh-huh um",
    "eighty eight point eight miles per hour",
    "four score and seven years ago",
    "forty two forty three",
    "twenty one hundred",
    "one hundred one hundred",
    "six six six",
    "ninety nine bottles",
]

# A tiny one that writes transcripts: 30 tokens of text, then those that stand for none, then times up to 0.2 seconds.
END, START, TRANSLATE, TRANSCRIBE, NO_TIMES = 30, 31, 36, 37, 41
LANGUAGES = {"<|en|>": 32, "<|de|>": 33, "<|fr|>": 34, "<|es|>": 35}
SPEAKER = CONFIG | {"vocab_size": 53, "max_target_positions": 30, "pad_token_id": END, "bos_token_id": START,
                    "eos_token_id": END, "decoder_start_token_id": START}
SEVERAL = {"decoder_start_token_id": START, "eos_token_id": END, "bos_token_id": START, "pad_token_id": END,
           "max_length": 30, "is_multilingual": True, "lang_to_id": LANGUAGES, "no_timestamps_token_id": NO_TIMES,
           "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE}, "return_timestamps": False,
           "forced_decoder_ids": [[1, None], [2, TRANSCRIBE]], "suppress_tokens": [3, 17, 31, 36, 37, 38, 39, 40],
           "begin_suppress_tokens": [13, END], "max_initial_timestamp_index": 3}
_ONE = {key: value for key, value in SEVERAL.items() if key not in ("lang_to_id", "task_to_id", "forced_decoder_ids")}
GENERATIONS = {  # what generation_config.json says; None: there is no such file
    "several": SEVERAL, "unforced": SEVERAL | {"forced_decoder_ids": None},
    "german": SEVERAL | {"forced_decoder_ids": [[1, 33], [2, TRANSCRIBE]]},
    "named": SEVERAL | {"language": "german", "task": "translate"},
    "one": _ONE | {"is_multilingual": False, "forced_decoder_ids": [[1, NO_TIMES]]},
    "one_unforced": _ONE | {"is_multilingual": False, "suppress_tokens": None, "begin_suppress_tokens": None,
                            "max_initial_timestamp_index": None},
    "none": None, "short": SEVERAL | {"max_length": 7}}
CASES = [(name, language, task, timestamps) for name in GENERATIONS for language, task in (
    ("", ""), ("de", ""), ("spanish", "translate"), ("", "translate")) for timestamps in (False, True)
    if not ((name[:3] in ("one", "non") and (language or task)) or (name == "none" and timestamps))]
LONG = np.random.default_rng(17).normal(size=(1, 95, 6)).astype(np.float32)  # of several windows


def loud(name, weight):
    """Return the weights of a model that says other tokens of other frames."""
    if "norm" in name:
        return weight * (name != "model.decoder.layer_norm.bias")
    return weight * (3 if name.endswith("embed_tokens.weight") else 6)

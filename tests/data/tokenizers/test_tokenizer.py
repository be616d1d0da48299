import numpy as np
import pytest

from jaxtrain.data import load_tokenizer
from jaxtrain.errors import UserError


def test_bytes_round_trip():
    tokenizer = load_tokenizer("bytes")
    text = "naïve\n\0 text ✓".encode()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16 and ids.tolist() == list(text)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod) == ("bytes", 257, 256)
    assert tokenizer.decode(ids) == text.decode()
    assert len(tokenizer.encode(b"")) == 0 and tokenizer.decode([]) == ""


def test_decode_drops_ids_without_text_and_mends_broken_characters():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode([72, 256, 105, 300, -1]) == "Hi"
    assert tokenizer.decode("é".encode()[:1]) == "�"


def test_unknown_name_is_told():
    with pytest.raises(UserError, match=r"data\.tokenizer.*did you mean 'bytes'"):
        load_tokenizer("byte")

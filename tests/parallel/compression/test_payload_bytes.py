"""Payloads survive the way through bytes; bytes that are none are refused in one sentence, and never decoded."""

import json

import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.parallel.compression import payload_bytes
from tests.parallel.compression.test_codecs import CODECS, SHAPE, arrays


def message():
    x = arrays(1)[0]
    return {f"layer/{name}": (codec, codec.encode(x, codec.begin(SHAPE))[0], SHAPE) for name, codec in CODECS.items()}


def test_payloads_survive_and_are_as_large_as_the_formula_says():
    sent = message()
    data = payload_bytes.to_bytes(sent)
    header = int.from_bytes(data[4:8], "little")
    assert len(data) == 8 + header + sum(codec.size(SHAPE) for codec, _, _ in sent.values())
    got = payload_bytes.from_bytes(data)
    assert list(got) == list(sent)
    for name, (codec, payload, shape) in got.items():
        assert (codec, shape) == (sent[name][0], SHAPE)
        for key, array in payload.items():
            np.testing.assert_array_equal(array, np.asarray(sent[name][1][key]))
        np.testing.assert_array_equal(codec.decode(payload, shape), codec.decode(sent[name][1], shape))


def changed(data, change):
    """The bytes with another header."""
    length = int.from_bytes(data[4:8], "little")
    header = change(json.loads(data[8:8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return data[:4] + len(text).to_bytes(4, "little") + text + data[8 + length:]


def of(key, value, which=3):
    def change(heads):
        heads[which][key] = value
        return heads
    return change


def test_bytes_that_are_none_are_refused():
    data = payload_bytes.to_bytes(message())
    settings = {"ratio": 0.1, "block": 100}
    wrong = [b"", data[:7], b"PK" + data, data[:-1], data + b"0", data[:50],
             *(changed(data, change) for change in (
                 lambda heads: b"[" * 5000, lambda heads: b"\xff", lambda heads: {}, lambda heads: [1], lambda heads: 7,
                 lambda heads: [*heads, heads[0]], of("name", 1), of("codec", "gzip"), of("codec", []), of("shape", 3),
                 of("shape", [3, 37, 11]), of("shape", [-3, -37, 10]), of("shape", [2.0]), of("shape", [2**50]),
                 of("settings", {}), of("settings", settings | {"more": 1}), of("settings", settings | {"block": "x"}),
                 of("settings", settings | {"ratio": 1e-320}), of("settings", settings | {"ratio": float("nan")}),
                 of("settings", settings | {"block": 50}), of("settings", {"ratio": 0.1, "seed": 2**80}, 4)))]
    for each in wrong:
        with pytest.raises(UserError, match=r"^payload: .*these bytes are not a payload; send"):
            payload_bytes.from_bytes(each)


def test_places_outside_of_a_block_are_refused():
    codec, payload, shape = message()["layer/top_k"]
    for row in (np.arange(10) + 91, np.zeros(10)):
        positions = np.array(payload["positions"])
        positions[2] = row
        with pytest.raises(UserError, match=r"names? a place twice, or one outside"):
            payload_bytes.from_bytes(payload_bytes.to_bytes({"x": (codec, payload | {"positions": positions}, shape)}))

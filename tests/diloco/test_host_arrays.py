"""Vectors of the first process reach the others in parts, since each device holds whatever is on its way."""

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from jaxtrain.diloco import host_arrays
from jaxtrain.diloco.host_arrays import of_first


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
@pytest.mark.parametrize("size", [0, 1, 400, 1001])
def test_a_vector_of_the_first_process_arrives_in_parts(dtype, size, monkeypatch):
    want, parts = np.arange(size).astype(dtype), []

    def sent(part):
        begin = sum(map(len, parts))
        parts.append(part)
        return want[begin:begin + len(part)]

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", sent)
    monkeypatch.setattr(host_arrays, "PART", 400)
    np.testing.assert_array_equal(of_first(np.zeros(size, dtype)), want, strict=True)
    assert len(parts) == -(-want.nbytes // 400) and all(part.nbytes <= 400 for part in parts)

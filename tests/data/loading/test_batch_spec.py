"""The description of a batch: a wrong batch is refused in one sentence, before anything is computed."""

import jax
import numpy as np
import pytest

from jaxtrain.data.loading.batch_spec import BatchSpec
from jaxtrain.errors import UserError
from tests.numerics import reference


@pytest.mark.parametrize(("key", "token"), [("tokens", -1), ("targets", 257), ("targets", 2**31 - 1)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_token_beyond_the_vocabulary_is_refused(key, token, dtype):
    spec = BatchSpec({"tokens": np.int32, "targets": np.int32}, "NextToken", below={"tokens": 257, "targets": 257})
    batch = {name: np.array([[0, 256], [3, 4]], dtype) for name in ("tokens", "targets")}
    assert spec.check(batch) == (2, 2)
    batch[key][1, 0] = token
    with pytest.raises(UserError, match=rf"^batch: its array '{key}' has the token {token}, and model"):
        spec.check(batch)
    assert spec.check(jax.device_put(batch)) == (2, 2)  # reading it back would hold the devices up


def test_targets_without_weight_may_be_any_number():
    spec = BatchSpec({"targets": np.int32, "weights": np.float32}, "NextToken", below={"targets": 257})
    batch = {"targets": np.array([[-100, 3]], np.int32), "weights": np.array([[0, 1]], np.float32)}
    assert spec.check(batch) == (1, 2)
    batch["weights"][:] = 1
    with pytest.raises(UserError, match="the token -100"):
        spec.check(batch)
    floats = BatchSpec({"targets": np.float32}, "Own", below={"targets": 257})
    assert floats.check({"targets": np.array([[-0.25]], np.float32)}) == (1, 1)


def test_a_run_refuses_such_a_batch():
    run = reference.build("gpt2")
    batch = reference.batch(0)
    batch["tokens"][0, 0] = run.config.model.vocab_size
    with pytest.raises(UserError, match=r"model\.vocab_size"):
        run.step(None, batch)

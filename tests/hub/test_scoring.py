"""Log-probabilities of texts are those of the whole logits of one device, on any mesh and in any batch."""

import jax
import numpy as np
import pytest

from jaxtrain.hub.scoring import score
from tests.hub import test_decoding
from tests.tiers import exhaustive, slow

RNG = np.random.default_rng(1)
PAIRS = [(RNG.integers(64, size=given).tolist(), RNG.integers(64, size=scored).tolist())
         for given, scored in ((3, 2), (1, 9), (20, 4), (5, 1), (30, 8), (0, 6))]  # the fifth is too long


@pytest.mark.parametrize(("family", "sizes"), [
    *slow(("gemma3", dict(context=2, tensor=4)), ("qwen3", dict(fsdp=4, stage=2))),
    *exhaustive(("gpt2", {}), ("gpt2", dict(tensor=8)), ("llama", dict(data=2, fsdp=2, tensor=2)),
                ("deepseek_v3", dict(fsdp=2, expert=2, tensor=2)))], ids=str)
def test_scores_are_those_of_all_logits(family, sizes):
    run = test_decoding.build(family, **{f"mesh__{axis}": size for axis, size in sizes.items()})
    params = test_decoding.state(run, family).all_params
    rows = [[*given, *scored][-test_decoding.LONGEST - 1:] for given, scored in PAIRS]
    logits = test_decoding.logits(family, [row[:-1] for row in rows])
    for batch_size in (64, 2):
        found = score(run, params, PAIRS, batch_size=batch_size)
        for row, (_, scored), all_TV, one in zip(rows, PAIRS, logits, found, strict=True):
            behind = np.arange(max(1, len(row) - len(scored)), len(row))  # places of what is scored
            want = np.asarray(jax.nn.log_softmax(all_TV[behind - 1]))
            targets = np.array(row)[behind]
            np.testing.assert_allclose(one.logprobs, want[np.arange(len(behind)), targets], rtol=1e-5, atol=1e-5)
            assert one.greedy == (want.argmax(-1) == targets).all()
    best = int(logits[0][len(rows[0]) - 3].argmax())
    assert score(run, params, [(PAIRS[0][0], [best])])[0].greedy

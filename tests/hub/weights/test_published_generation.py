"""Every published type: greedy generation with a cache gives the tokens that transformers gives without one."""

import numpy as np
import pytest

import jaxtrain as jt
from tests.hub import published, published_models
from tests.hub.cases import CASES
from tests.tiers import exhaustive, slow

# LongRoPE's factors are here those of `model.max_seq_len`, and in transformers those of each text's length.
COMPARED = [name for name in CASES if not name.endswith("longrope_long")]
SAMPLED = COMPARED[::9]  # others are exhaustive


@pytest.mark.parametrize("name", [*slow(*SAMPLED), *exhaustive(*(name for name in COMPARED if name not in SAMPLED))])
def test_greedy_generation_is_that_of_transformers(name, tmp_path):
    case = published.truth(name)
    run, params = published_models.loaded(published.write(tmp_path, case))
    found = jt.generate(run, run.with_params(params), published.PROMPTS.tolist(), max_new_tokens=published.NEW,
                        temperature=0.0)
    room = min(published.NEW, run.config.model.max_seq_len - published.PROMPTS.shape[1])
    np.testing.assert_array_equal([one.tokens for one in found], np.array(case["greedy"])[:, :room])

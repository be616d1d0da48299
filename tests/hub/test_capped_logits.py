"""Generation and scoring of a model with soft caps return what the whole forward pass does."""

import jax
import numpy as np

import jaxtrain as jt
from jaxtrain.hub.scoring import score
from tests.hub import published, published_models

PROMPTS, NEW = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2]], 6  # texts longer than the window


def test_generation_and_scoring_cap_scores_and_logits(tmp_path):
    run, params = published_models.loaded(published.write(tmp_path, published.truth("gemma2")))
    forward = jax.jit(lambda tokens: jax.nn.log_softmax(run.model.merge(params)(tokens)))
    found = jt.generate(run, run.with_params(params), PROMPTS, max_new_tokens=NEW, temperature=0, logprobs=True)
    again = score(run, params, [(prompt, one.tokens) for prompt, one in zip(PROMPTS, found, strict=True)])
    for prompt, one, scored in zip(PROMPTS, found, again, strict=True):
        logps_TV = np.asarray(forward(np.array([[*prompt, *one.tokens]], np.int32)))[0, len(prompt) - 1:-1]
        assert list(one.tokens) == logps_TV.argmax(-1).tolist() and scored.greedy
        want = logps_TV[np.arange(NEW), list(one.tokens)]
        np.testing.assert_allclose(one.logprobs, want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(scored.logprobs, want, rtol=1e-5, atol=1e-5)

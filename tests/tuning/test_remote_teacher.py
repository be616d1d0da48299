"""A teacher on loopback: its log-probabilities are those of the same model here, and what is refused."""

import contextlib
import urllib.parse

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.hub import scoring
from jaxtrain.hub.generate import Generated
from jaxtrain.tuning.remote_teacher import RemoteTeacher
from tests.numerics import reference
from tests.tuning.test_remote_rewards import pauses, scorer  # noqa: F401
from tests.tuning.test_rollouts import config, files, on_four  # noqa: F401

pytestmark = pytest.mark.usefixtures("cache")
ALONE = dict(rl__reward="", rl__group_size=2, model__vocab_size=264)


@contextlib.contextmanager
def served(answer):
    """A server of completions; yields its URL, and what it was asked."""
    with scorer(answer) as (place, asked):
        yield f"http://{urllib.parse.urlsplit(f'//{place}').netloc}/v1", asked


def completions(run, params):
    """Return an answer like vLLM's, made by a model of jaxtrain: the text's tokens, and one more."""
    def answer(_, asked):
        texts = asked["prompt"]
        scored = scoring.score(run, params, [(text[:1], text[1:]) for text in texts])
        choices = [{"index": n, "logprobs": {"token_logprobs": [None, *one.logprobs.tolist(), -1.0]}}
                   for n, one in enumerate(scored)]
        return 200, {"choices": choices[::-1]}
    return answer


@pytest.mark.slow
def test_a_server_teaches_as_the_same_model_here(files, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "text.txt").write_text("say 1: yes, and say 2: no.\n" * 200)
    jt.train(config(files, rl__prompts="", rl__reward="", rl__group_size=8, rl__max_new_tokens=64, train__steps=2,
                    data__source=str(tmp_path / "text.txt"), train__seed=5), tmp_path / "teacher")
    loaded, state = jt.load_model(tmp_path / "teacher", {"mesh.data": 4})
    with served(completions(loaded, state.all_params)) as (url, asked):
        batches = []
        for teacher in (f"{url}#large", str(tmp_path / "teacher")):
            run = jt.build(config(files, rl__teacher=teacher, **ALONE))
            run.see(0, run.init())
            batches.append(run.data[0])
    path, _, content = asked[0]
    assert path == "/v1/completions" and content["model"] == "large" and content["echo"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *batches)
    assert np.ptp(batches[0]["advantages"]) > 0.01


@pytest.mark.parametrize(("teacher", "url", "model"), [
    ("http://h:1/v1", "http://h:1/v1/completions", ""), ("http://h:1/v1/#m", "http://h:1/v1/completions", "m"),
    ("http://h:1/v1?key=a#m", "http://h:1/v1/completions?key=a", "m")])
def test_a_url_may_have_a_query_and_name_a_model(teacher, url, model):
    found = RemoteTeacher.of(reference.tiny("llama", rl__prompts="p", rl__teacher=teacher, rl__max_new_tokens=2))
    assert (found.service.url, found.model) == (url, model)


@pytest.mark.parametrize(("answer", "why"), [
    ({"choices": []}, "0 choices for 2 texts"),
    ({"choices": [{"index": n, "logprobs": None} for n in range(2)]}, "'NoneType' object is not subscriptable"),
    ({"choices": [{"index": n, "logprobs": {"token_logprobs": [None, -1.0]}} for n in range(2)]},
     "2 log-probabilities for 4 tokens"),
    ({"choices": [{"index": n, "logprobs": {"token_logprobs": [None, -1.0, None, -1.0]}} for n in range(2)]},
     "one is missing, or is not a log-probability"),
    (b"{", ""),
])
def test_answers_of_another_form_are_told_in_one_line(answer, why, pauses):  # noqa: F811
    with served(lambda *_: (200, answer)) as (url, _):
        c = reference.tiny("llama", rl__prompts="p", rl__teacher=url, rl__group_size=2, rl__max_new_tokens=2)
        with pytest.raises(jt.UserError) as refusal:
            RemoteTeacher.of(c)([[1, 2]] * 2, [Generated("", (3, 4), (-1.0, -2.0), "length")] * 2)
    said = str(refusal.value)
    assert said.startswith(f"rl.teacher: what {url}/completions answers has no log-probability of each token")
    assert why in said and "such as vLLM" in said

"""The config in a workdir, which may be damaged."""

import json

import pytest

import jaxtrain as jt
from jaxtrain.hub import trained_model


@pytest.mark.parametrize("name", [["a"], {}, "x", None, 3])
def test_a_model_that_there_is_not_is_one_sentence(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model": {"name": name}}))
    for attempt in (lambda: trained_model.sections_of(tmp_path), lambda: jt.load_model(tmp_path),
                    lambda: jt.load_config(tmp_path / "config.json")):
        with pytest.raises(jt.UserError, match=r"model\.name"):
            attempt()


def test_a_config_without_a_name_is_that_of_the_default(tmp_path):
    (tmp_path / "config.json").write_text('{"model": {}}')
    assert trained_model.sections_of(tmp_path)["model"] == {"name": "gpt2"}


@pytest.mark.parametrize("step", [-1, -10**9])
def test_a_step_below_zero_is_one_sentence(step, tmp_path):
    """The `--step` of generate, export and evaluate."""
    with pytest.raises(jt.UserError) as error:
        trained_model.load(tmp_path, None, step, abstract={})
    assert str(error.value) == (f"--step: {step} is not a step; leave it out for the newest good checkpoint, or see "
                                f"those that there are: jaxtrain checkpoint list {tmp_path}")

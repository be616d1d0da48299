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

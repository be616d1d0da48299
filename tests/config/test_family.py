"""The table of families: one of another package is checked as any, and a broken one does not disturb the others."""

import json
import subprocess
import sys

import pytest

import jaxtrain as jt
from jaxtrain.config import family
from jaxtrain.hf import hf_config
from tests.plug_in_package import importable, install, install_documented


@pytest.mark.parametrize(("keys", "message"), [
    ({"qk_norm": 2}, "model.qk_norm: '2' is not true or false; "),
    ({"name": "gpt2", "qk_norm": True}, "model.qk_norm: gpt2 has no such key; remove it, or use cohere or "
     "stablelm or parallel_llama"),
    ({"name": "parallel_lama"}, "model.name: there is no model 'parallel_lama'; did you mean 'parallel_llama'?"),
])
def test_keys_of_one_of_another_package_are_checked_as_any(tmp_path, keys, message):
    with importable(install_documented(tmp_path)), pytest.raises(jt.UserError) as refusal:
        jt.make_config({"model": {"name": "parallel_llama"} | keys})
    assert f"{refusal.value}".startswith(message)


def test_configs_of_families_are_read_without_jax():
    code = ("import sys; from jaxtrain.config import family; found = dict(family.families());"
            "from jaxtrain.hf import hf_config; hf_config.types(); print(len(found), 'jax' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"{len(family.FAMILIES.own)}", "False"]


@pytest.mark.parametrize(("value", "message"), [
    ("no_such_module:FAMILY", "cannot be imported (ModuleNotFoundError"), ("json:loads", "cannot be used as one")])
def test_a_broken_family_of_another_package_is_told_where_it_is_asked_for(tmp_path, value, message):
    with importable(install(tmp_path, "broken", {"jaxtrain.families": {"broken": value}})):
        with pytest.raises(jt.UserError) as refusal:
            jt.make_config({"model": {"name": "broken"}})
        assert message in f"{refusal.value}"
        assert [name for name, _ in family.families()] == [*family.FAMILIES.own]


def test_quantized_weights_of_an_unknown_method_are_refused(tmp_path):
    for said in ({"load_in_4bit": True}, {"quant_method": None, "bits": 4}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": said}))
        with pytest.raises(jt.UserError, match=r"quantization_config=.* cannot be expressed: only plain weights can"):
            hf_config.model_section(tmp_path)

"""The values of `train.remat`, by name and by layer."""

import pytest

import jaxtrain as jt
from jaxtrain.config.remat_policies import Policy, policies


@pytest.mark.parametrize(("text", "want"), [
    ("none", [(Policy((), everything=True), 6)]),
    ("full", [(Policy(()), 6)]),
    ("attention_and_dots", [(Policy(("attention", "dots")), 6)]),
    ("attention+mlp", [(Policy(("attention", "mlp")), 6)]),
    ("heads+mlp@host", [(Policy(("heads",), ("mlp",)), 6)]),
    ("full:1,attention:2,dots", [(Policy(()), 1), (Policy(("attention",)), 2), (Policy(("dots",)), 3)]),
    ("full:5,none:1", [(Policy(()), 5), (Policy((), everything=True), 1)]),
])
def test_policies_of_six_layers(text, want):
    assert policies(text, 6) == want


@pytest.mark.parametrize(("text", "sentence"), [
    ("fulll", "unknown policy 'fulll'; did you mean 'full'?"),
    ("mlpp+attention", "unknown policy 'mlpp'; did you mean 'mlp'?"),
    ("mlp@hosts", "'mlp@hosts' is not supported; known: attention, attention_and_dots, auto, dots, full, none"),
    ("attention@host", "attention@host is not the result of one product; name a logical axis: mlp@host"),
    ("full+mlp", "'full' is not a name to be joined with others; join attention, dots and logical axes"),
    ("full,none", "'full' does not say for how many layers; write full:NUMBER,POLICY"),
    ("full:2,none", "the numbers in 'full:2,none' do not add up to the 2 stacked layers of the model; leave out"),
    ("full:1,none:2", "the numbers in 'full:1,none:2' do not add up to the 2 stacked layers of the model; leave out"),
    ("full:1,", "'' is not supported; known: attention, attention_and_dots, auto, dots, full, none"),
])
def test_a_mistake_is_one_sentence(text, sentence):
    with pytest.raises(jt.UserError) as caught:
        jt.build(jt.load_config("configs/gpt.py:tiny", {"train.remat": text, "mesh.data": 1}), devices=1)
    assert f"{caught.value}".startswith(f"train.remat: {sentence}")

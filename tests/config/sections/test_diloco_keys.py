"""The refusals of the section of islands."""

import pytest

from jaxtrain.config.load import make_config
from jaxtrain.errors import UserError


@pytest.mark.parametrize("keys, said", [
    (dict(every=10), r"diloco.every: it is read with diloco.count only"),
    (dict(count=2, index=2), r"diloco.index: there are 2 islands"),
    (dict(count=2, mode="ring"), r"diloco.mode: 'ring' is not supported"),
    (dict(count=2, every=50, fragments=3), r"diloco.every: 50 steps do not divide into 3 fragments"),
    (dict(count=2, every=50, fragments=5, overlap=10), r"diloco.overlap: an exchange begins every 10 steps"),
    (dict(count=2, blend=0.1), r"diloco.blend: it is read with diloco.overlap only"),
    (dict(count=2, mode="async", fragments=2), r"diloco.fragments: an update of diloco.mode=async has all param"),
    (dict(count=2, age_decay=1.0), r"diloco.age_decay: only diloco.mode=async reads it"),
    (dict(count=2, pull=0.5), r"diloco.pull: only diloco.mode=gossip reads it"),
    (dict(count=2, mode="gossip", pull=0.4), r"diloco.pull: with diloco.momentum=0.9, islands drift apart from 0.38"),
    (dict(count=2, compression="int4", rank=2), r"diloco.rank: diloco.compression=int4 does not read it; leave it"),
    (dict(count=2, compression="power_sgd", rank=0), r"diloco.rank: 0 is not positive"),
    (dict(count=2, compression="int2"), r"diloco.compression: 'int2' is not supported"),
    (dict(count=2, meeting="tcp://host:7000"), r"diloco.keys: tcp://host:7000 needs certificates; give"),
    (dict(count=2, meeting="/shared", keys="keys"), r"diloco.keys: /shared takes no certificates; leave it out, or"),
    (dict(count=2, momentum=1.0), r"diloco.momentum: 1.0 is not in"),
])
def test_refusals(keys, said):
    with pytest.raises(UserError, match=said):
        make_config({"diloco": keys})


@pytest.mark.parametrize("keys, said", [
    ({"rl": {"prompts": "p.jsonl", "reward": "r.py:f"}, "train": {"eval_every": 0}},
     r"^rl.prompts: prompts are not divided among islands"),
    ({"train": {"patience": 2, "eval_every": 5}}, r"^train.patience: each island has evaluations of its own"),
    ({"resilience": {"spikes": "rollback"}}, r"^resilience.spikes: what an island has offered stays in the log"),
])
def test_sections_with_which_islands_do_not_go(keys, said):
    with pytest.raises(UserError, match=said):
        make_config({"diloco": dict(count=2)} | keys)

"""The table of families: one of another package trains on a mesh, is saved and found again, with no edit here."""

import json
import sys

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.config import family

PARALLEL = '''
from dataclasses import dataclass
from functools import partial

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import positive


@dataclass(frozen=True)
class ParallelConfig(RotaryConfig):
    """Llama's layers, with the MLP beside attention."""

    name: str = "parallel_llama"
    branch_scale: float = 1.0  # what both branches are multiplied by

    def __post_init__(self):
        super().__post_init__()
        positive(self, "model", "branch_scale")


def parallel_llama(c, compute, *, rngs):
    import jaxtrain.models.layers as layers
    from jaxtrain.models.attention.rotary import Rotary, scaled_frequencies
    from jaxtrain.models.attention.self_attention import Attention
    from jaxtrain.models.decoder import Block, Decoder
    from jaxtrain.sharding import rules as sharding

    class ParallelBlock(Block):
        def __call__(self, x, segments, angles, cache=None):
            h = sharding.enter(self.attention_norm(x), layers.INSIDE, shared_by=self.attention.shared_by)
            y, aux = self.attention(h, segments, angles, cache)
            return x + c.branch_scale * (y + self.mlp(h)), aux

    norm = partial(layers.RMSNorm, c.embed_dim, c.norm_eps)

    def block(rngs):
        attention = Attention(c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim, out_std=0.02, window=c.window,
                              backend=compute.attention, context=compute.context, rngs=rngs)
        return ParallelBlock(norm(rngs=rngs), attention, norm(rngs=rngs),
                             layers.SwiGLU(c.embed_dim, c.mlp_dim, out_std=0.02, rngs=rngs))

    head = None if c.tied_embeddings else layers.Head(c.vocab_size, c.embed_dim, rngs=rngs)
    return Decoder(layers.Embed(c.vocab_size, c.embed_dim, rngs=rngs), block, c.num_layers, norm(rngs=rngs),
                   rotary=Rotary(*scaled_frequencies(c, c.head_dim)), head=head, compute=compute, rngs=rngs)


FAMILY = Family(ParallelConfig, parallel_llama)
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with one family, in a folder outside of jaxtrain."""
    site = tmp_path / "site"
    about = site / "my_families-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-families\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[jaxtrain.families]\nparallel_llama = my_parallel_llama:FAMILY\n")
    (site / "my_parallel_llama.py").write_text(PARALLEL)
    monkeypatch.syspath_prepend(site)
    for cached in (family._from_outside, family.family):
        cached.cache_clear()
    yield
    sys.modules.pop("my_parallel_llama", None)
    monkeypatch.undo()
    for cached in (family._from_outside, family.family):
        cached.cache_clear()


def config(text, **mesh):
    return jt.make_config({
        "model": {"name": "parallel_llama", "branch_scale": 0.5, "num_layers": 2, "embed_dim": 32, "num_heads": 4,
                  "num_kv_heads": 2, "mlp_dim": 48, "vocab_size": 320, "max_seq_len": 16},
        "data": {"source": f"{text}", "seq_len": 16, "global_batch_size": 8}, "mesh": mesh,
        "optimizer": {"warmup_steps": 0}, "train": {"steps": 1, "precision": "float32", "eval_every": 0}})


@pytest.mark.usefixtures("package")
def test_a_family_of_another_package_trains_on_a_mesh_and_resumes(tmp_path):
    (text := tmp_path / "text").mkdir()
    (text / "a.txt").write_text("some words and others, again and again. " * 100)
    one = jt.build(config(text, data=1), devices=jax.devices()[:1])
    _, wanted = one.step(one.init(), one.batch(0))
    spread = config(text, fsdp=2, tensor=2, data=2)
    state = jt.train(spread, tmp_path / "run")
    found = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert found["loss"] == pytest.approx(float(wanted["loss"]), rel=1e-5)
    assert found["grad_norm"] == pytest.approx(float(wanted["grad_norm"]), rel=1e-5)
    again = jt.train(spread, tmp_path / "run")
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(state.params), jax.device_get(again.params)))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("keys", "message"), [
    ({"branch_scale": 0.0}, "model.branch_scale: 0.0 is not positive; "),
    ({"name": "gpt2", "branch_scale": 1.0}, "model.branch_scale: gpt2 has no such key; remove it, or use parallel_ll"),
    ({"name": "parallel_lama"}, "model.name: there is no model 'parallel_lama'; did you mean 'parallel_llama'?"),
])
def test_its_keys_are_checked_as_any(keys, message):
    with pytest.raises(jt.UserError) as refusal:
        jt.make_config({"model": {"name": "parallel_llama"} | keys})
    assert f"{refusal.value}".startswith(message)


def test_a_family_of_jaxtrain_counts_before_one_of_another_package(monkeypatch):
    class Point:
        def load(self):
            raise AssertionError("it is not loaded")

    monkeypatch.setattr(family, "_from_outside", lambda: {"gpt2": Point()})
    assert family.family.__wrapped__("gpt2").config.__name__ == "Gpt2Config" and family.names().count("gpt2") == 1


def test_configs_of_families_are_read_without_jax(tmp_path):
    import subprocess

    code = ("import sys; from jaxtrain.config import family; found = dict(family.families());"
            "from jaxtrain.hf import hf_config; hf_config.types(); print(len(found), 'jax' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"{len(family.FAMILIES)}", "False"]

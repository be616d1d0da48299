"""Slow paths are said by the choosers of the kernels, with what they cost, and nothing else is."""

import jax
import pytest

import jaxtrain as jt
from jaxtrain.kernels import slow_paths
from jaxtrain.run.slow_kernels import sentences

HOPPER = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jaxtrain's kernels for GPUs need JAX 0.11")


@pytest.mark.parametrize(("platform", "said"), [
    ("cpu", []), ("tpu", []),
    pytest.param("cuda:9", [], marks=HOPPER),
    *((gpu, ["all pairs of tokens: twice what causal attention needs"]) for gpu in ("cuda:10", "cuda:8")),
    ("cuda:7", ["a mask of 0.13 GB for each row of 8,192", "compute every row 16 times"])])
def test_what_usual_models_compute_slowly(platform, said):
    found = slow_paths.usual(platform)
    assert len(found) == len(said) and all(words in sentence for words, sentence in zip(said, found, strict=True))


def run_of(platform, config="llama3_8b.py:tiny", devices=2, **keys):
    keys = {"mesh.data": 1, "mesh.fsdp": devices, "train.precision": "bfloat16", "data.global_batch_size": 8} | {
        key.replace("__", "."): value for key, value in keys.items()}
    return jt.build(jt.load_config(f"configs/{config}", keys), devices=devices, platform=platform)


@pytest.mark.parametrize(("platform", "keys", "said"), [
    ("cpu", {}, []), ("cuda:10", dict(data__cross_document_attention=True), []),
    ("cuda:10", dict(data__seq_len=128, model__max_seq_len=128), ["; train.attention=triton computes only what is"]),
    ("cuda:10", {}, ["packed rows computes all pairs"]),  # of 64 tokens, less than a tile
    ("cuda:10", dict(model__head_dim=264), ["no kernel here (heads of 264 are over 256)"]),
    ("cuda:10", dict(train__precision="float32"), ["attention has no kernel here: 1.6e-05 GB"]),
    ("cuda:10", dict(mesh__fsdp=1, mesh__context=2, mesh__context_strategy="ring"), []),
    ("cuda:10", dict(mesh__fsdp=1, mesh__context=2, mesh__context_strategy="ring", train__precision="float32"),
     ["context by ring has no kernel"]),
    ("cuda:10", dict(mesh__fsdp=1, mesh__context=2), ["packed rows computes all pairs"]),
    ("cuda:10", dict(config="mixtral_8x7b.py:tiny"), ["packed rows"]),
    ("cuda:10", dict(config="mixtral_8x7b.py:tiny", train__grouped_matmul="xla"),
     ["packed rows", "compute every row 8 times"]),
    ("cpu", dict(config="mixtral_8x7b.py:tiny"), []), ("cpu", dict(train__precision="mxfp8"), []),
    ("cuda:10", dict(train__precision="mxfp8", data__cross_document_attention=True), []),
    ("cuda:8", dict(train__precision="nvfp4"), ["packed rows", "nvfp4 has no hardware here"]),
    ("cuda:8", dict(train__precision="fp8"), ["packed rows", "fp8 has no hardware here"]),
    *(("tpu", dict(config="gemma3_1b.py:tiny", mesh__fsdp=1, mesh__context=2, mesh__context_strategy=strategy,
                   model__head_dim=128, data__seq_len=256, model__max_seq_len=256), said)
      for strategy, said in (("ring", ["with a window over context by ring has no kernel on TPUs"]), ("ulysses", []))),
    ("tpu", dict(train__precision="mxfp8"), ["attention has no kernel", "mxfp8 has no hardware here"])])
def test_a_run_says_what_it_computes_slowly(platform, keys, said):
    found = sentences(run_of(platform, **keys))
    assert len(found) == len(said) and all(words in sentence for words, sentence in zip(said, found, strict=True))

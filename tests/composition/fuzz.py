"""Any combination, same numbers: configs drawn at random, each compared with a plain model on one device in float32.

    python -m tests.composition.fuzz --cases=100 --seed=7 --devices=16

draws meshes of all six axes, rules, schedules, strategies, rematerialisation, accumulation, ZeRO stages, precisions,
optimizers and the dtypes of their moments, averages of parameters, offloading, gradients summed over `data` once a
step, frozen parameters, adapters, dropout, noise on embeddings, packing, rows without a valid token, model families,
tied and untied tables, muP, scanned and unrolled layers, buffers of experts, kernels of recurrent states, interpreted;
training, and of some evaluation and `value_and_grad`. With --kernels it draws for one device on which those of GPUs
are interpreted.
What `jt.build` refuses is counted apart; a refusal must be one that jaxtrain.run.validation documents. A case
fails where the loss, the gradient's norm or any leaf of the gradient is off, and is printed as the config that shows it
again.
"""

import argparse
import collections
import functools
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from jaxtrain.config.schema import AXES
from jaxtrain.proof import drawn_layouts
from jaxtrain.proof.virtual_devices import virtual_devices
from jaxtrain.run import shapes_of

ROWS, SEQ = 32, 32
# Relative to the largest element of a leaf; coarser dtypes are compared with float32 too.
# tests/sharding/test_products.py is strict with fp8.
# Formats with scales of blocks are compared with one device in the same format, all else in float32.
NARROW = ("mxfp8", "nvfp4")
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.06, "float16": 0.02, "fp8": 0.3} | dict.fromkeys(NARROW, 0.01)
# Between two neighbours of a rounded first moment, from which the gradient is read.
MOMENTS = {"float32": 0.0, "bfloat16": 2**-7, "int8": 4 / 127}
# Rows of which no token is valid: those of some devices, or all of one micro-batch.
EMPTY = {"": slice(0), "block": slice(8), "stride": slice(0, None, 4)}
# Rules of one's own. Where an axis no longer splits tokens, nothing may rest on it either: hence the preset.
OVERRIDES = [{f"mesh.overrides.{name}": axes for name, axes in table.items()} | more for table, more in (
    ({"block_seq": "context"}, {}),
    ({"vocab": "none", "act_vocab": "none"}, {}),
    ({"mlp": "none", "act_mlp": "none"}, {}),
    ({"batch": "data+fsdp"}, {"mesh.rules": "data"}),
    ({"seq": "none", "block_seq": "none"}, {"mesh.rules": "data"}),
    ({"seq": "none", "block_seq": "none", "batch": "data+context+fsdp+expert"}, {"mesh.rules": "data"}),
)]
DENSE = ("gpt2", "gpt2", "llama", "qwen2", "qwen3", "gpt2_untied", "gemma3")
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "kimi_linear")
HYBRIDS = {"kimi_linear": 0.07, "qwen3_5": 0.14, "bamba": 0.2}  # of the first with a number above that dealt


def draw(rng: random.Random, devices: int) -> dict[str, Any]:
    """One config, as keys like those of a command line."""
    often = functools.partial(drawn_layouts.often, rng)
    sizes = drawn_layouts.mesh_sizes(rng, devices)
    family = rng.choice(DENSE if rng.random() < 0.55 else EXPERTS[:3])
    if family in EXPERTS and random.Random(f"{rng.getstate()}").random() < 0.25:  # added later: others stay as drawn
        family = EXPERTS[3]
    if family == "llama" and random.Random(f"{rng.getstate()}").random() < 0.5:  # likewise
        family = "olmo2"
    dealt = random.Random(f"hybrid {rng.getstate()}").random()  # likewise
    family = next((hybrid for hybrid, below in HYBRIDS.items() if dealt < below), family)
    schedule = rng.choice(drawn_layouts.SCHEDULES)
    keys = {f"mesh.{axis}": size for axis, size in sizes.items()} | {
        "family": family, "packing": rng.random() < 0.8, "data.global_batch_size": ROWS, "data.seq_len": SEQ,
        "model.max_seq_len": SEQ, "model.num_layers": rng.choice((2, 3, 5)),
        "model.tied_embeddings": rng.random() < 0.5, "model.window": often(0, 7),
        "mesh.context_strategy": rng.choice(drawn_layouts.STRATEGIES),
        "mesh.rules": often(*drawn_layouts.RULES) if sizes["tensor"] == 1 else "fsdp_tp",
        "train.remat": often(*drawn_layouts.REMAT), "train.accumulation": often(*drawn_layouts.ACCUMULATION),
        "train.unroll": often(*drawn_layouts.UNROLL), "train.loss_chunks": often(*drawn_layouts.LOSS_CHUNKS),
        "train.z_loss": often(0.0, 1e-3), "train.precision": often("float32", "float32", "bfloat16", "float16", "fp8"),
        "optimizer.zero_stage": rng.choice(drawn_layouts.ZERO_STAGES),
    }
    if sizes["stage"] > 1:
        keys |= {"pipeline.schedule": schedule, "pipeline.overlap": rng.random() < 0.3,
                 "pipeline.microbatches": often(*drawn_layouts.MICROBATCHES), "pipeline.recompute": rng.random() < 0.5,
                 "pipeline.chunks": often(0, 3) if schedule == "interleaved" else 0}
    if family in EXPERTS:
        keys |= {"model.capacity_factor": often(0.0, 0.75, 1.25)}
    if family == "deepseek_v3":
        keys |= {"model.value_head_dim": rng.choice((6, 8)), "model.dense_layers": rng.choice((0, 1))}
    if family in EXPERTS:
        layers = keys["model.num_layers"] - keys.get("model.dense_layers", family in ("qwen3_moe", "kimi_linear"))
    if family in EXPERTS and family != "gpt_oss":
        keys |= {"model.experts_every": often(1, *(every for every in (2, 3, 4) if layers % every == 0), 1)}
    if family in ("gemma3", "gpt_oss"):
        keys |= {"model.window": 7, "model.global_every": rng.choice((2, 3))}
    elif not family.startswith("gpt2"):
        keys |= {"model.mtp_loss_weight": often(0.0, 0.3)}
    if family in HYBRIDS:  # likewise; what looks ahead would be a layer of the last kind
        keys.pop("model.mtp_loss_weight", None)
        keys |= {"train.precision": "bfloat16"} if keys["train.precision"] == "float16" else {}
    if family == "olmo2":  # without float16: its norms of small branches make the first scale of the loss too large
        del keys["model.mtp_loss_weight"]
        keys |= {"train.precision": "bfloat16"} if keys["train.precision"] == "float16" else {}
    if family == "qwen2" and (not keys["model.window"] or keys["model.mtp_loss_weight"]):
        keys |= {"model.global_first": 0}
    if rng.random() < 0.25:  # a width that few axes divide together
        keys |= {"model.embed_dim": 40, "model.head_dim": 8}
    if rng.random() < 0.3:
        keys |= rng.choice(OVERRIDES[:2] if family in EXPERTS else OVERRIDES)
    keys |= {"evaluate": rng.random() < 0.3, "value_and_grad": rng.random() < 0.2, "empty": often("", *EMPTY)}
    name = often("adamw", "adamw", "muon", "adafactor")
    keys |= {"optimizer.name": name}
    if name != "adafactor":
        keys |= {"optimizer.moment_dtype": often(*MOMENTS)}
    keys |= {"optimizer.offload": rng.random() < 0.3}
    keys |= {"train.freeze": often([], ["embed/*"], ["blocks/layer/*attention/*", "norm/*"], ["heads"])}
    whole = sizes["context"] == 1 or keys["mesh.context_strategy"] == "ulysses"
    if whole and keys["train.precision"] != "float16" and rng.random() < 0.3:  # kernels, interpreted
        other = random.Random(f"kernel {rng.getstate()}").random() < 0.4  # added later
        keys |= {"train.attention": "triton" if other else "splash"}
    if not keys.get("model.mtp_loss_weight") and rng.random() < 0.25:
        keys |= {"data.cross_document_attention": True}
    rng = random.Random(f"{sorted(keys.items())}")  # its own numbers: what follows changes no other draw
    keys |= remat_of(keys, rng) | lora_of(keys, rng)
    keys |= {"train.ema_decay": 0.75} if rng.random() < 0.3 else {}
    keys |= mup_of(keys, rng)
    keys |= muon_of(keys, random.Random(f"muon {rng.getstate()}"))
    keys |= speed_of(keys, random.Random(f"{rng.getstate()}"))  # added later
    keys |= noise_of(keys, random.Random(f"noise {rng.getstate()}"))
    if keys.get("model.mtp_loss_weight") and random.Random(f"further {rng.getstate()}").random() < 0.3:
        keys |= {"model.mtp_layers": 2}
    ring = sizes["context"] > 1 == sizes["stage"] and keys["mesh.context_strategy"] == "ring"
    if ring and keys["train.precision"] != "float16" and random.Random(f"ring {rng.getstate()}").random() < 0.4:
        keys |= {"train.attention": "splash"}  # added later, too: on blocks of a ring
    if family in HYBRIDS and (kernels := random.Random(f"states {rng.getstate()}")).random() < 0.6:
        keys |= {"train.recurrent_kernel": "pallas", "interpret": kernels.choice(("tpu", "gpu"))}  # added later, too
    once = sizes["stage"] == 1 and keys["optimizer.zero_stage"] < 3 and rng.random() < 0.4
    keys |= {"compression.method": "exact"} if once else {}
    keys |= narrow_of(keys, random.Random(f"narrow {rng.getstate()}"))
    return keys | clip_of(keys, random.Random(f"clip {rng.getstate()}"))


def clip_of(keys: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """QK-clip with a limit that no logit reaches, in some of the cases that have it: measuring changes nothing."""
    fit = keys["family"] in ("gpt2", "gpt2_untied", "llama", "qwen2", "mixtral", "deepseek_v3", "gpt_oss")
    other = keys.get("lora.rank") or keys.get("model.mtp_loss_weight") or keys["train.freeze"]
    return {"optimizer.qk_clip": 1e6} if fit and not other and rng.random() < 0.3 else {}


def narrow_of(keys: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Formats with scales of blocks, in some of the cases of plain decoders, of sizes that have whole blocks.

    Micro-batches have scales of their own, so that one device has the numbers of the same ones only; so have the
    groups of `data` with gradients that are compressed, and with "exact" ones.
    """
    routed = keys["family"] in ("mixtral", "qwen3_moe", "gpt_oss")
    fit = (routed or keys["family"] in ("gpt2", "gpt2_untied", "llama", "qwen3")) and keys["mesh.stage"] == 1
    if not fit or "compression.method" in keys or rng.random() < 0.8:
        return {}
    kind, wide = rng.choice(NARROW), {"model.embed_dim": 64, "model.num_heads": 4, "model.head_dim": 32}
    wide |= {"model.mlp_dim": 128} | ({} if keys["family"].startswith("gpt2") else {"model.num_kv_heads": 2})
    wide |= {"lora.quantize": ""} if keys.get("lora.quantize") else {}
    if routed:  # a further pass, which an even load does not need, would cut the blocks of rows
        wide |= {"model.expert_mlp_dim": 32 * max(2, keys["mesh.tensor"]), "train.expert_buffer": 0.0}
    seq = 64 * keys["mesh.context"]  # whole blocks in each half of a device's part
    return wide | {"train.precision": kind, "train.accumulation": 1, "evaluate": False, "data.seq_len": seq,
                   "model.max_seq_len": seq, "data.global_batch_size": 8, "empty": "", "optimizer.name": "adamw",
                   "optimizer.moment_dtype": "float32", "optimizer.normalize_neurons": False,
                   "optimizer.split_heads": False}


def muon_of(keys: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Options of Muon, in some of its cases; those of one head each are refused beside a narrower base."""
    if keys["optimizer.name"] != "muon":
        return {}
    return {"optimizer.normalize_neurons": rng.random() < 0.5,
            "optimizer.split_heads": rng.random() < 0.5 and "model.mup_base" not in keys}


def mup_of(keys: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A narrower base model in some of the cases, whose heads, latents or MLPs are in proportion or not."""
    if rng.random() < 0.75 or keys["family"] in HYBRIDS:
        return {}
    base = {"embed_dim": rng.choice((8, 20)), "num_heads": 4}
    base |= rng.choice(({}, {"head_dim": 2}, {"mlp_dim": 16}, {"num_kv_heads": 8}))
    base |= {"kv_rank": 24} if keys["family"] == "deepseek_v3" and rng.random() < 0.5 else {}
    if keys["family"] == "deepseek_v3":  # all parts of a head grow alike
        base |= {"head_dim": keys.get("model.head_dim", 4) // 2, "rope_head_dim": 1,
                 "value_head_dim": keys["model.value_head_dim"] // 2}
    return {"model.mup_base": base} | ({"model.query_scale": 0} if keys["family"] == "gemma3" else {})


def remat_of(keys: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Policies by name and by layer, in some of the cases."""
    by_name = ["attention+heads", "heads@host"]
    layers = keys["model.num_layers"] - keys.get("model.dense_layers", 0)
    in_groups = keys["family"] in HYBRIDS or layers <= keys.get("model.experts_every", 1)
    several = keys["mesh.stage"] == 1 and not in_groups  # layers that a policy each is for
    by_layer = ["full:1,attention_and_dots", "attention:1,none", "dots:1,heads@host"] if several else []
    return {"train.remat": rng.choice(by_name + by_layer)} if rng.random() < 0.3 else {}


def speed_of(keys: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Keys that change how fast a step is and no number of it, in some of the cases."""
    found: dict[str, Any] = {"train.deterministic": True} if rng.random() < 0.2 else {}
    if rng.random() < 0.2:
        found |= {"train.unroll": -1}
    if rng.random() < 0.2:  # policies that keep products, and with them what serves gradients in their place
        names = ("dots+heads@host", "attention+experts+expert_mlp") if keys["family"] in EXPERTS else (
            "dots+mlp@host", "attention+heads+kv_heads+mlp")
        found |= {"train.remat": rng.choice(("dots", "attention+dots", *names))}
    if keys["family"] in EXPERTS:
        found |= {"train.expert_buffer": rng.choice((1.25, 2.0, 0.0, 0.25, 1.0, 1.5))}
        found |= {"train.expert_exchange": rng.choice(("auto", "gather"))}
    return found


def noise_of(keys: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Random numbers in training, in some of the cases: dropout of adapters, and noise on embeddings."""
    dropout = bool(keys.get("lora.rank")) and not keys.get("lora.experts") and rng.random() < 0.4
    return ({"lora.dropout": 0.3} if dropout else {}) | (
        {"train.neftune_noise_alpha": 5.0} if rng.random() < 0.1 else {})


def lora_of(keys: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Adapters in some of the cases, of all linear layers or of attention."""
    if keys["optimizer.name"] != "adamw" or keys["train.freeze"] or rng.random() < 0.8:
        return {}
    quantize = rng.choice(("", "", "int8", "nf4")) if keys.get("train.precision") != "fp8" else ""
    targets, kind = rng.choice((["*"], ["*attention/*"])), rng.choice(("", "", "dora", "experts"))
    experts = {"lora.experts": True} if kind == "experts" and keys["family"] in EXPERTS else {}
    pissa = {"lora.init": "pissa", "train.init_from": "unread"} if not kind + quantize and rng.random() < 0.4 else {}
    return {"lora.rank": rng.choice((1, 3)), "lora.alpha": 4.0, "lora.targets": targets, "lora.quantize": quantize,
            "lora.dora": kind == "dora"} | experts | pissa


def config_of(keys: dict[str, Any]):
    """The case's config, whose kernels of states are those of `interpret`; raises UserError where it is refused."""
    import jax.numpy as jnp

    from jaxtrain.kernels.chunks import chunk_kernels
    from jaxtrain.train_step import precision
    from tests.numerics import reference

    chunk_kernels.INTERPRET = keys.get("interpret", "")
    precision.DTYPES["bfloat16"] = jnp.float32 if keys.get("train.precision") in NARROW else jnp.bfloat16
    own = ("family", "packing", "evaluate", "value_and_grad", "empty", "interpret")
    rest = {key.replace(".", "__"): value for key, value in keys.items() if key not in own}
    return reference.tiny(keys["family"], **rest)


def batch_of(packing: bool, empty: str = "", whole: bool = False, shape: tuple[int, int] = (ROWS, SEQ)) -> dict[
        str, Any]:
    """A batch whose rows hold several segments, or one each; some are empty. `whole`: weighted like the former, in rows
    of one segment: what attention across documents makes of it.
    """
    import numpy as np

    from tests.numerics import reference

    (rows, seq), batch = shape, reference.batch(0, *shape)
    if whole or not packing:
        batch |= {"segments": (batch["segments"] > 0).astype(np.int32) if packing else np.ones_like(batch["segments"]),
                  "positions": np.broadcast_to(np.arange(seq, dtype=np.int32), (rows, seq)).copy()}
    for name in ("segments", "weights"):
        batch[name][EMPTY[empty]] = 0
    return batch


@functools.lru_cache(maxsize=32)
def _truth(model: Any, batch: tuple[Any, ...], z_loss: float, lora: Any, targets: tuple[str, ...]) -> tuple[Any, ...]:
    """Return of the plain model: initial parameters, loss, gradient, its norm, cross-entropy, new biases of routers.

    `batch`: what `batch_of` takes.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxtrain.models.lora import scale
    from jaxtrain.models.make_model import make_model
    from jaxtrain.train_step.state import Skeleton
    from tests.numerics import reference
    from tests.numerics.plain_lora import at_random, merged

    init = jax.jit(lambda key: Skeleton.of(make_model(model, None, lora, rngs=nnx.Rngs(params=key))).params())
    everything = at_random(jax.device_get(init.lower(jax.random.key(0)).compile(reference.QUICKLY)(
        jax.random.key(0))))
    everything = reference.with_biases(everything) if model.name == "gpt_oss" else everything

    def value(floats):
        params = jax.tree.map(lambda x, whole: whole if x is None else x, floats, everything, is_leaf=_is_none)
        params = merged(params, scale(lora)) if lora.rank else params
        loss, excess = reference.loss_and_excess(model, params, batch_of(*batch), z_loss)
        return loss, (excess, reference.evaluation(model, params, batch_of(*batch)))

    # Weights in few bits are integers, which have no gradient.
    floats = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, everything)
    ((loss, (excess, entropy)), grads) = jax.jit(jax.value_and_grad(value, has_aux=True)).lower(floats).compile(
        {"xla_backend_optimization_level": 0})(floats)
    bias = jnp.sign(jnp.round(excess, 6)) * -model.experts.bias_rate if model.experts.bias_rate else None
    return everything, *jax.device_get((loss, grads, reference.norm_of(grads), entropy, bias))


def _alone(keys: dict[str, Any], params: Any, batch: Any) -> tuple[float, Any]:
    """Return the loss and gradient of a case on one device, without what is only for speed: where numbers are random
    or rounded by blocks.

    tests/models/test_training_noise.py and tests/sharding/test_block_products.py compare those with plain formulas.
    """
    import jax

    import jaxtrain as jt
    from tests.numerics import reference

    kept = ("train.freeze", "train.init_from", "train.z_loss", "train.neftune_noise_alpha", "family", "packing",
            "interpret")
    plain = {key: value for key, value in keys.items() if key in kept or key.startswith(("model.", "data.", "lora."))}
    precision = keys["train.precision"] if keys["train.precision"] in NARROW else "float32"
    run = jt.build(config_of(plain | {"train.precision": precision}), devices=jax.devices()[:1])
    loss, grads = jax.device_get(run.value_and_grad(reference.start_from(run, params), batch))
    return loss, jax.tree_util.tree_map_with_path(lambda path, g: 0 * g if _is_router_bias(path) else g, grads)


def _is_router_bias(path: tuple[Any, ...]) -> bool:
    """Return whether a leaf's "gradient" is its experts' excess of load, which counts in no norm."""
    from jax.tree_util import keystr

    return "['router']['bias']" in keystr(path)


def _further(head: Any) -> Iterator[Any]:
    """Yield the parameters of each layer that predicts further tokens."""
    while head is not None:
        yield head
        head = head.get("later")


def _is_none(x: Any) -> bool:
    return x is None


def check(keys: dict[str, Any]) -> dict[str, float]:
    """Run one step of the case; raises AssertionError where a number is off, UserError where it is refused."""
    import jax
    import numpy as np

    import jaxtrain as jt
    from jaxtrain.models.lora import scale
    from jaxtrain.sharding import mesh_context
    from jaxtrain.train_step import partition
    from tests.numerics import reference
    from tests.numerics.plain_lora import merged

    config = config_of(keys)
    devices = int(np.prod([keys[f"mesh.{axis}"] for axis in AXES]))
    run = jt.build(config, devices=jax.devices()[:devices])
    shape = config.data.global_batch_size, config.data.seq_len
    drawn = keys["packing"], keys.get("empty", ""), config.data.cross_document_attention, shape
    batch, precision = batch_of(*drawn[:2], shape=shape), keys["train.precision"]
    params, loss, grads, norm, entropy, bias = _truth(
        config.model, drawn, config.train.z_loss, config.lora, tuple(config.lora.targets))
    noisy = bool(config.lora.dropout or config.train.neftune_noise_alpha) or precision in NARROW
    if noisy:
        (loss, grads), bias = _alone(keys, params, batch), None
    grads = partition.like(grads, run.layout.axes)  # those of what is trained
    norm = reference.norm_of(grads) if keys.get("train.freeze") or config.lora.rank or noisy else norm
    state, by_call = reference.start_from(run, params), None
    if keys.get("value_and_grad") or config.optimizer.name != "adamw":
        by_call = jax.device_get(run.value_and_grad(state, batch))
    state, metrics = reference.compiled(run)(state, run.sharded.place(batch))
    metrics = jax.device_get(metrics)

    assert not config.optimizer.qk_clip or 0 < metrics["max_attention_logit"] < 1e6, "no attention logit was measured"
    tolerance = TOLERANCE[precision]
    c = config.optimizer
    off = {what: abs(float(metrics[key]) / float(want) - 1)
           for what, key, want in (("loss", "loss", loss), ("norm", "grad_norm", norm),
                                   ("cross-entropy", "cross_entropy", entropy)) if what != "cross-entropy" or not noisy}
    floor, leaf = (1e-3 if precision == "float32" else 3e-2) * float(norm), ""
    if config.optimizer.name == "adamw":
        got = from_moments(state, grads, c, float(metrics["grad_norm"]))
        off["gradient"], leaf = reference.worst(got, grads, floor)
    if by_call is not None:
        off["value of value_and_grad"] = abs(float(by_call[0]) / float(loss) - 1)
        got = jax.tree_util.tree_map_with_path(
            lambda path, g, want: want if _is_router_bias(path) else g, by_call[1], grads)
        off["gradient of value_and_grad"], leaf = reference.worst(got, grads, floor)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state.params))), "a parameter is lost"
    if config.train.ema_decay:
        began, now = (partition.like(tree, grads) for tree in (params, jax.device_get(state.params)))
        want = jax.tree.map(lambda a, p: 0.75 * a + 0.25 * p, began, now)
        off["average"], _ = reference.worst(state.extras["ema"], want, floor=1e-3)
    if bias is not None and precision == "float32" and not config.lora.rank:
        p = state.all_params
        new = [reference.router(config.model, p)["bias"],
               *(head["block"]["mlp"]["router"]["bias"][None] for head in _further(p.get("ahead")))]
        off["router bias"] = float(np.abs(np.concatenate(new) - bias).max())
    if keys.get("evaluate"):
        with mesh_context.use(run.mesh, run.sharded.rules):
            lowered = jax.jit(run.sharded.evaluation).lower(run.abstract.all_params, shapes_of(run).abstract())
        at_rest = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), params, run.abstract.all_params)
        total, weight = lowered.compile(reference.QUICKLY)(at_rest, run.sharded.place(batch))
        shown = batch_of(*drawn)
        plain = merged(params, scale(config.lora)) if config.lora.rank else params
        want = jax.jit(lambda p: reference.evaluation(config.model, p, shown))(plain)
        off["evaluation"] = abs(float(total) / float(weight) / float(want) - 1)
    assert int(metrics["skipped"]) == 0, "the step was skipped: something was not finite"
    for what, error in off.items():
        limit = tolerance if what.startswith("gradient") or precision == "float32" else tolerance / 5
        # Narrow adapters sum what nearly cancels, with the noise of few bits: on one device too.
        limit *= 2 if what.startswith("gradient") and precision == "fp8" and config.lora.rank else 1
        limit += MOMENTS[c.moment_dtype] if what == "gradient" else 0
        assert error < limit, f"{what} is off by {error:.1e}{f', at {leaf}' if what.startswith('gradient') else ''}"
    return off


def from_moments(state: Any, grads: Any, c: Any, norm: float) -> Any:
    """Return the gradient of the first step, from AdamW's first moments; of what has none, `grads`."""
    import jax
    import numpy as np

    from jaxtrain.train_step.optimizers import moments

    found = jax.tree.map(lambda s: moments.in_float32(s) if isinstance(s, moments.RoundedState) else s,
                         jax.device_get(state.opt_state), is_leaf=lambda s: isinstance(s, moments.RoundedState))
    mu = next(s.mu for s in jax.tree.leaves(found, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu"))
    clipped = (1 - c.b1) * min(1, c.clip_norm / norm)
    is_none = lambda x: not isinstance(x, (jax.Array, np.ndarray)) and not isinstance(x, dict)  # noqa: E731
    return jax.tree.map(lambda m, g: g if is_none(m) else np.asarray(m) / clipped, mu, grads, is_leaf=is_none)


def main(argv: list[str] | None = None) -> int:
    """Draw and check; one line of JSON a case. -> how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("cases", 5), ("seed", 0), ("devices", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kernels", action="store_true", help="on one device, with the kernels of GPUs interpreted")
    parser.add_argument("--quickly", action="store_true", help="compile as tests do, without LLVM's optimizations")
    parser.add_argument("--case", help="one case to run again: the keys, as printed")
    parser.add_argument("--log", help="a file to append the lines to")
    args = parser.parse_args(argv)
    args.devices = 1 if args.kernels else args.devices
    os.environ["JAX_PLATFORMS"] = "cpu"
    quickly = virtual_devices(args.devices)
    os.environ["XLA_FLAGS"] = quickly if args.quickly else f"--xla_force_host_platform_device_count={args.devices}"
    import jax

    import jaxtrain as jt
    from jaxtrain.run.validation import explains
    from tests.composition import fuzz_kernels

    if args.kernels:
        fuzz_kernels.interpret()
    draw_one = fuzz_kernels.draw if args.kernels else functools.partial(draw, devices=args.devices)
    rng, seen, counts = random.Random(args.seed), set(), collections.Counter()
    while counts["ok"] + counts["failed"] < args.cases and not (args.case and seen):
        keys = json.loads(args.case) if args.case else draw_one(rng)
        text = json.dumps(keys, sort_keys=True)
        if text in seen:
            continue
        seen.add(text)
        start, line = time.time(), {"case": keys}
        try:
            line |= {"ok": {what: float(f"{error:.1e}") for what, error in check(keys).items()}}
        except jt.UserError as refusal:
            line |= {"refused" if explains(refusal) else "failed": str(refusal)}
        except AssertionError as error:
            line |= {"failed": str(error) or "an assertion of JAX"}
        except Exception as error:
            line |= {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
        counts["failed" if "failed" in line else "refused" if "refused" in line else "ok"] += 1
        line |= {"seconds": round(time.time() - start, 1)}
        if "refused" not in line:
            print(json.dumps(line), flush=True)
        if args.log:
            with open(args.log, "a") as file:
                file.write(json.dumps(line) + "\n")
        jax.clear_caches()
    print(json.dumps(dict(counts) | {"jax": jax.__version__, "devices": args.devices, "seed": args.seed}))
    return counts["failed"]


if __name__ == "__main__":
    sys.exit(1 if main() else 0)

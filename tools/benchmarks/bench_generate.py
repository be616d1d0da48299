"""Measure how fast text is generated, beside the rate at which this machine can read the weights and the cache.

    python tools/benchmarks/bench_generate.py --rows=1 --rows=16
    python tools/benchmarks/bench_generate.py --config=configs/gpt.py:124m --peer --rows=1 --rows=8 --rows=32
    python tools/benchmarks/bench_generate.py --config=configs/gpt.py:124m --adapters=4

A step of generation has to read all weights but the embeddings of other tokens, and the cache that is filled so far.
The limit is that number of bytes over the bandwidth of a sum over an array as large as the weights, measured in the
same run; the bandwidth of a copy, which writes as well, is printed beside it.

With --peer: transformers' own `generate`, with the same weights in the same dtype, in the same process, in turn.
Without it: the path without a cache, which computes the whole text again for every token, for one token at its end.

With --adapters=N: the model alone, with one adapter, and with N stacked ones of which every row uses another, in turn.

Answers of unequal lengths: bench_sampler.py.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import jaxtrain as jt
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.files import atomic_files
from jaxtrain.hf import hf_config
from jaxtrain.hub.adapters import adapter_files
from jaxtrain.hub.weights import published_weights
from jaxtrain.models import lora
from jaxtrain.run import abstract_model

NEW, PROMPT, REPEATS, RANK = 32, 64, 3, 16


def seconds(*calls: Callable[[], Any]) -> list[float]:
    """The median time of each call, one after the other, after one round that compiles."""
    took: list[list[float]] = [[] for _ in calls]
    for _ in range(1 + REPEATS):
        for call, times in zip(calls, took, strict=True):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return [statistics.median(times[1:]) for times in took]


def steps(*generate: Callable[[int], Any]) -> list[float]:
    """The time of a step of each of these, which take the number of new tokens: without the pass over the prompts."""
    took = seconds(*(lambda one=one, new=new: one(new) for one in generate for new in (NEW, 1)))
    return [(whole - first) / (NEW - 1) for whole, first in zip(took[::2], took[1::2], strict=True)]


def bandwidth(size: int) -> tuple[float, float]:
    """Bytes a second of a sum over an array of so many bytes, and of a copy of it, which reads and writes."""
    array = jnp.ones(size // 4, jnp.float32)
    total, copied = jax.jit(jnp.sum), jax.jit(jnp.negative)
    read, copy = seconds(lambda: total(array).block_until_ready(), lambda: copied(array).block_until_ready())
    return array.nbytes / read, 2 * array.nbytes / copy


def published(run, params, folder: Path) -> Path:
    """Write the model as a published folder, in float32."""
    folder.mkdir()
    published_weights.save(params, run.config.model, folder, np.dtype("float32"), 2**40)
    atomic_files.write_json(folder / hf_config.FILE, hf_config.config_json(run.config.model))
    return folder


def of_transformers(folder: Path, dtype: str) -> Callable[[list[list[int]], int], list[list[int]]]:
    """Return transformers' greedy generation with the model in a folder."""
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")

    def generate(prompts, new):
        ids = torch.tensor(prompts)
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                               do_sample=False, pad_token_id=0, use_cache=True)
        return found[:, ids.shape[1]:].tolist()
    return generate


def with_adapters(run, state, folder: Path, rows: list[int], many: int) -> None:
    """Print tokens a second of the model alone, with one adapter, and with several of which rows use another each."""
    base = published(run, state.params, folder / "base")
    adapted = jt.build(replace(run.config, lora=LoraConfig(rank=RANK)), mesh=run.mesh)
    for n in range(many):
        rng = np.random.default_rng(n)
        made = jax.tree.map(lambda leaf, rng=rng: jax.device_put(
            0.01 * rng.standard_normal(leaf.shape, np.float32), leaf.sharding), lora.adapters(abstract_model(adapted)))
        (folder / f"{n}").mkdir()
        adapter_files.save(made, run.config.model, adapted.config.lora, folder / f"{n}", f"{base}",
                           np.dtype("float32"))
    overrides = {"train.precision": run.config.train.precision}
    contenders = {"none": (jt.load_model(base, overrides), [])} | {f"{number}": (jt.load_model(
        base, overrides, adapters={f"{n}": folder / f"{n}" for n in range(number)}), [f"{n}" for n in range(number)])
        for number in (1, many)}
    print(f"| rows | adapters of rank {RANK} | tokens/s |\n|---|---|---|")
    for count in rows:
        prompts = np.random.default_rng(0).integers(1, run.config.model.vocab_size, (count, PROMPT)).tolist()

        def generated(new, loaded, names, prompts=prompts):
            chosen = [names[n % len(names)] for n in range(len(prompts))] if names else None
            jt.generate(*loaded, prompts, max_new_tokens=new, temperature=0, adapters=chosen)

        took = steps(*(lambda new, one=one: generated(new, *one) for one in contenders.values()))
        for name, step in zip(contenders, took, strict=True):
            print(f"| {count} | {name} | {count / step:,.1f} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/llama3_1b.py")
    parser.add_argument("--layers", type=int, default=4, help="of the model's; the rest is left out")
    parser.add_argument("--rows", type=int, action="append", default=[])
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--peer", action="store_true", help="beside transformers, which has to be installed")
    parser.add_argument("--adapters", type=int, default=0, help="measure what stacked adapters cost instead")
    flags = parser.parse_args()
    config = jt.load_config(flags.config, {
        "model.num_layers": flags.layers, "model.max_seq_len": PROMPT + NEW, "data.seq_len": PROMPT + NEW,
        "data.global_batch_size": jax.device_count(), "mesh.fsdp": 1, "mesh.data": jax.device_count(),
        "train.precision": flags.precision, "train.accumulation": 1})
    run = jt.build(config)
    params = run.init().params
    state, rows = replace(run.abstract, params=params), flags.rows or [1, 16]
    with tempfile.TemporaryDirectory() as folder:
        if flags.adapters:
            with_adapters(run, state, Path(folder), rows, flags.adapters)
        else:
            beside_the_limit(run, state, rows, of_transformers(
                published(run, params, Path(folder) / "base"), flags.precision) if flags.peer else None)
    return 0


def beside_the_limit(run, state, rows: list[int], peer: Any) -> None:
    """Print tokens a second, the limit, and tokens a second of transformers or without a cache."""
    c, params, width = run.config.model, state.params, np.dtype(run.config.train.precision).itemsize
    counts = {name: sum(x.size for x in jax.tree.leaves(part)) for name, part in params.items()}
    tables = ("positions", *(["embed"] if "output" in counts else []))  # of which a step reads some rows
    weights = width * sum(size for name, size in counts.items() if name not in tables)
    per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * width
    read, copied = bandwidth(weights)
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}: {weights / 1e9:.3f} GB of {width * 8}-bit weights "
          f"to read, {per_token / 1e3:,.1f} kB of cache a token; bandwidth {read / 1e9:.1f} GB/s (a copy: "
          f"{copied / 1e9:.1f})\n")
    print("| rows | limit, tokens/s | tokens/s | of the limit | "
          + ("transformers | of the limit | ratio | same tokens |\n|---|---|---|---|---|---|---|---|" if peer
             else "without a cache |\n|---|---|---|---|---|"))
    whole = jax.jit(lambda params, tokens: run.model.merge(run.sharded.cast(params))(tokens)[:, -1])
    for count in rows:
        prompts = np.random.default_rng(0).integers(1, c.vocab_size, (count, PROMPT)).tolist()
        limit = count * read / (weights + count * (PROMPT + NEW / 2) * per_token)

        def generated(new, prompts=prompts):
            return jt.generate(run, state, prompts, max_new_tokens=new, temperature=0)

        if not peer:
            step, = steps(generated)
            tokens = jnp.ones((count, PROMPT + NEW), jnp.int32)
            again, = seconds(lambda tokens=tokens: whole(params, tokens).block_until_ready())
            rest = f"{count / again:,.1f}"
        else:
            step, other = steps(generated, lambda new, prompts=prompts: peer(prompts, new))
            same = sum(a == b for one, tokens in zip(generated(NEW), peer(prompts, NEW), strict=True)
                       for a, b in zip(one.tokens, tokens, strict=True))
            rest = (f"{count / other:,.1f} | {count / other / limit:.0%} | {other / step:.2f} | "
                    f"{same / count / NEW:.0%}")
        print(f"| {count} | {limit:,.1f} | {count / step:,.1f} | {count / step / limit:.0%} | {rest} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())

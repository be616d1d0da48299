"""Measure what a sampler in another process is sent: all weights at first, and what has changed with each step.

    python tools/benchmarks/bench_sent_weights.py --layers=12
    export XLA_FLAGS=--xla_force_host_platform_device_count=8
    python tools/benchmarks/bench_sent_weights.py --config.mesh.fsdp=8

What is printed of the first version is what each version cost where everything was sent each time; of the others, the
median. Between versions, everything that is trained changes. A model that is served in this process loads each.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import jax

import jaxtrain as jt
from jaxtrain.commands.flags import overrides_of
from jaxtrain.tuning.samplers.sent_weights import SentWeights, sends_adapters
from jaxtrain.tuning.samplers.served_model import ServedModel

KINDS = {"all weights": {}, "MLPs alone": {"train.trainable": ["*/mlp/*"]},
         "DoRA of c_attn": {"lora.rank": 16, "lora.dora": True, "lora.targets": ["c_attn"]},
         "LoRA": {"lora.rank": 16}}


def measured(config: str, overrides: dict, versions: int, folder: Path) -> list[tuple[int, float, float]]:
    """Return the bytes of each version, and the seconds in which it was written and loaded."""
    run = jt.build(jt.load_config(config, overrides))
    plain = jt.build(jt.load_config(config, {key: value for key, value in overrides.items() if "lora" not in key}))
    served, sent, found = ServedModel(plain, plain.init(), "model"), SentWeights(run, folder), []
    state, moved = run.init(), jax.jit(lambda params: jax.tree.map(lambda x: x * 1.01 + 1e-3, params))
    for version in range(versions):
        weights = sent.written(version, state)
        began = time.perf_counter()
        if sends_adapters(run.config):
            served.load_adapter(f"{version}", weights.folder)
        else:
            served.reload(weights.folder)
        found.append((sent.written_bytes, sent.written_s, time.perf_counter() - began))
        sent.drop_before(version)
        state = replace(state, params=moved(state.params))
    served.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/gpt.py:124m")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--versions", type=int, default=6)
    flags, rest = parser.parse_known_args()
    many = jax.device_count()
    overrides = {"model.num_layers": flags.layers, "data.global_batch_size": many, "train.accumulation": 1,
                 "mesh.fsdp": 1, "mesh.data": 1 if rest else many, **overrides_of(rest, vars(flags))}
    print("| trained | MB of the first | written, loaded | MB of each other | written, loaded |\n|---|---|---|---|---|")
    for name, keys in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            first, *others = measured(flags.config, overrides | keys, flags.versions, Path(folder) / "weights")
        size, written, loaded = (statistics.median(column) for column in zip(*others, strict=True))
        print(f"| {name} | {first[0] / 1e6:,.1f} | {first[1]:.2f} s, {first[2]:.2f} s | {size / 1e6:,.1f} | "
              f"{written:.2f} s, {loaded:.2f} s |", flush=True)


if __name__ == "__main__":
    main()

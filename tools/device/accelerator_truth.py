"""Compare a device with CPUs computing in float32: tiny families, 20 steps of packed documents.

    python tools/device/accelerator_truth.py --write     makes the figures anew, on CPU, in accelerator_truth.json

Losses of all steps, and of the first step's gradient the norm and some elements of every parameter. Initial values are
exact on every device, and batches are drawn by numpy, so that nothing but the arithmetic of a step can differ.
"""

import argparse
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
FILE = Path(__file__).with_suffix(".json")
STEPS, ROWS, SEQ, VOCAB, SAMPLE = 20, 8, 64, 320, 24
_EXPERTS = dict(num_experts=8, expert_mlp_dim=64, experts_per_token=2, tied_embeddings=False)
FAMILIES: dict[str, dict[str, Any]] = {  # of heads that share keys, widths of heads that every kernel takes
    "gpt2": dict(name="gpt2"),
    "llama": dict(name="llama", num_kv_heads=2, tied_embeddings=False),
    "llama_window": dict(name="llama", num_kv_heads=2, window=24),
    "qwen3": dict(name="qwen3", num_kv_heads=2, head_dim=32),
    "gemma3": dict(name="gemma3", num_kv_heads=2, window=24, global_every=2),
    "mixtral": dict(name="mixtral", num_kv_heads=2, balance_loss=0.02, **_EXPERTS),
    "deepseek_v3": dict(name="deepseek_v3", num_layers=3, dense_layers=1, q_rank=32, kv_rank=32, rope_head_dim=8,
                        value_head_dim=16, shared_experts=1, router="sigmoid", router_bias_rate=0.01, **_EXPERTS),
}


@functools.cache
def run_of(family: str, precision: str, attention: str) -> Any:
    """A run of this family on one device."""
    import jax

    import jaxtrain as jt

    config = jt.make_config({
        "model": dict(vocab_size=VOCAB, num_layers=2, embed_dim=64, num_heads=4, head_dim=16, mlp_dim=128,
                      max_seq_len=SEQ) | FAMILIES[family],
        "mesh": dict(data=1), "data": dict(seq_len=SEQ, global_batch_size=ROWS),
        "optimizer": dict(learning_rate=3e-3, warmup_steps=4, clip_norm=1.0),
        "train": dict(steps=STEPS, precision=precision, attention=attention),
    })
    return jt.build(config, devices=jax.devices()[:1])


def batch(step: int) -> dict[str, np.ndarray]:
    """A packed batch of text that can be learnt: each token decides the next, except for some noise."""
    draw = np.random.default_rng(step)
    tokens = np.zeros((ROWS, SEQ + 1), np.int64)
    tokens[:, 0] = draw.integers(VOCAB, size=ROWS)
    for t in range(SEQ):
        tokens[:, t + 1] = (3 * tokens[:, t] + 1 + (draw.random(ROWS) < 0.1)) % VOCAB
    starts = draw.random((ROWS, SEQ)) < 0.05
    starts[:, 0] = True
    segments = np.cumsum(starts, 1)
    positions = np.arange(SEQ) - np.maximum.accumulate(np.where(starts, np.arange(SEQ), 0), 1)
    padding = np.arange(SEQ) >= SEQ - draw.integers(0, 8, size=(ROWS, 1))
    arrays = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], segments=np.where(padding, 0, segments),
                  positions=positions)
    weights = (~padding).astype(np.float32)
    return {key: value.astype(np.int32) for key, value in arrays.items()} | {"weights": weights}


def computed(family: str, precision: str = "float32", attention: str = "xla") -> dict[str, Any]:
    """Losses, and the first gradient's norm and elements, by the step that training takes."""
    import jax

    run = run_of(family, precision, attention)
    state, losses, gradients = run.init(), [], {}
    for step in range(STEPS):
        state, metrics = run.step(state, batch(step))
        losses.append(float(metrics["loss"]))
        if step == 0:  # Adam's first moment is now (1 - b1) times the clipped gradient
            o, norm = run.config.optimizer, float(metrics["grad_norm"])
            scale = (1 - o.b1) * min(1.0, o.clip_norm / norm)
            moments = next(part.mu for part in jax.tree.leaves(
                state.opt_state, is_leaf=lambda part: hasattr(part, "mu")) if hasattr(part, "mu"))
            for path, leaf in jax.tree_util.tree_flatten_with_path(jax.device_get(moments))[0]:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                gradients[name] = sketch(np.asarray(leaf, np.float64) / scale)
    return {"losses": losses, "grad_norm": norm, "gradients": gradients}


def judged(case: tuple[str, str, str, float, float]) -> dict[str, Any]:
    """The errors of a case and whether they are within its tolerances, or why it failed."""
    *what, loss, gradient = case
    try:
        found = errors(computed(*what), wanted()[what[0]])
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    return {**found, "right": found["loss"] < loss and found["grad_norm"] < loss and found["gradient"] < gradient}


def sketch(leaf: np.ndarray) -> dict[str, Any]:
    """The root mean square of an array, and some of its elements."""
    flat = leaf.ravel()
    places = np.linspace(0, flat.size - 1, min(SAMPLE, flat.size)).astype(int)
    return {"rms": float(np.sqrt(np.mean(flat**2))), "elements": [float(f"{value:.7g}") for value in flat[places]]}


def errors(got: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    """The largest relative error of a loss; of the gradient's norm; of a parameter's gradient, and whose."""
    losses = np.abs(np.array(got["losses"]) / np.array(want["losses"]) - 1)
    # A key's bias shifts all scores of a query alike: its gradient is zero up to rounding, hence the floor.
    floor = 1e-3 * max(leaf["rms"] for leaf in want["gradients"].values())
    each = {name: _rms(np.array(got["gradients"][name]["elements"]) - np.array(leaf["elements"])) / max(
        _rms(np.array(leaf["elements"])), leaf["rms"], floor) for name, leaf in want["gradients"].items()}
    worst = max(each, key=each.__getitem__)
    return {"loss": float(losses.max()), "grad_norm": abs(got["grad_norm"] / want["grad_norm"] - 1),
            "gradient": float(each[worst]), "of": worst}


def wanted() -> dict[str, Any]:
    """The figures that a CPU made ahead of time."""
    return json.loads(FILE.read_text())


def cases(platform: str, few: bool = False) -> Iterator[tuple[str, str, str, float, float]]:
    """(family, precision, attention, tolerance of losses and norm, of a parameter's gradient) for a kind of device.

    In bfloat16 some tokens go to other experts, which changes the experts' gradients more than rounding does. Gemma 3
    has twice the norms, and a CPU's rounding alone gives 0.02; a window that is off by one gives 0.14.
    """
    for family in ("gpt2", "mixtral") if few else FAMILIES:
        yield family, "float32", "xla", 1e-4, 1e-4
        for attention in ("xla", "cudnn") if platform in ("gpu", "cuda") else ("xla",):
            if not few or family == "gpt2":
                yield family, "bfloat16", attention, 1e-2, (
                    0.15 if "num_experts" in FAMILIES[family] else 0.04 if family == "gemma3" else 0.02)
        if family == "llama":
            yield family, "fp8", "xla", 5e-2, 0.15


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="make the file anew; on CPU only")
    flags = parser.parse_args()
    import jax

    if flags.write:
        if jax.default_backend() != "cpu":
            raise SystemExit("the figures to compare with are a CPU's: set JAX_PLATFORMS=cpu")
        lines = ",\n".join(f'"{family}": {json.dumps(computed(family))}' for family in FAMILIES)
        FILE.write_text(f"{{\n{lines}\n}}\n")
    for family, precision, attention, *_ in cases(jax.default_backend()):
        print(family, precision, attention, errors(computed(family, precision, attention), wanted()[family]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

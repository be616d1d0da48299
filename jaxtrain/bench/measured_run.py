"""One measurement of a config's training, its record, and that as text."""

import os
from collections.abc import Sequence
from typing import Any

from jaxtrain.errors import UserError, say


def measured(source: str, overrides: dict[str, str], steps: int, warmup: int = 5, *, compared: Sequence[str] = (),
             profile: bool = False, targets: str | None = None) -> dict[str, Any]:
    """Measure a config and return the record; every process of a run calls it.

    Args:
        source: the config, as `--config` names it.
        steps: how many are measured, after `warmup` others.
        compared: names of other implementations, which are measured in alternation.
        profile: also trace a few steps.
        targets: a file of `jaxtrain calibrate`, for the predictions.
    """
    import jax

    from jaxtrain.bench import contenders
    from jaxtrain.bench.compare import compare
    from jaxtrain.bench.measurement import measure
    from jaxtrain.builder import build
    from jaxtrain.config.load import load_config
    from jaxtrain.distributed import processes
    from jaxtrain.plan import preflight
    from jaxtrain.sharding.mesh import training_devices

    config = load_config(source, overrides)
    processes.agree(config)
    if config.rl.prompts:
        raise UserError("rl.prompts", "a bench has no answers of the model to train on", "train some steps with "
                        "jaxtrain.main: metrics.jsonl has rollout_s, reward_s and step_time_s of each")
    if config.preference.reference == "precomputed":
        raise UserError("preference.reference", "a bench does not compute the reference's numbers before its steps",
                        "measure with a copy: preference.reference=copy")
    run = build(preflight.resolve(config, training_devices(config.rl.sampler_devices)))
    contenders.refuse(list(compared), run)
    processes.connect(config.resilience.start_limit)
    if targets is None and (predicted := preflight.check(run)) and jax.process_index() == 0:
        say(predicted)
    record = {"what": "compare" if compared else "run", **described(run), "steps": steps, "warmup": warmup}
    try:
        if compared:
            return record | compare(run, list(compared), steps, warmup)
        return record | measure(run, steps, warmup, traced=profile, file=targets)
    except Exception as error:
        if not out_of_memory(error) or jax.process_count() > 1:
            raise
        return record | {"failed": f"out of memory: {f'{error}'.splitlines()[0][:200]}{_memory_in_use()}"}


def _memory_in_use() -> str:
    """Say how much of a device's memory is in use, where JAX reports it: the rest may be in small pieces."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    if not stats.get("bytes_limit"):
        return ""
    used, limit, free = (stats.get(name, 0) / 1e9 for name in ("bytes_in_use", "bytes_limit",
                                                               "largest_free_block_bytes"))
    return f"; {used:.1f} of {limit:.1f} GB are in use, the largest free block has {free:.1f} GB"


def described(run: Any) -> dict[str, Any]:
    """Describe what was measured: the model, mesh, batch and other settings, for the record."""
    c = run.config
    return {"config_hash": c.hash(), "model": c.model.name, "parameters": _count(run),
            "precision": run.sharded.settings.precision,
            "mesh": {axis: size for axis, size in run.mesh.shape.items() if size > 1},
            "rows": c.data.global_batch_size, "seq_len": c.data.seq_len, "accumulation": c.train.accumulation,
            "remat": c.train.remat, "unroll": c.train.unroll, "offload": c.optimizer.offload,
            "optimizer": c.optimizer.name}


def shown(record: dict[str, Any]) -> str:
    """Render a record as text for the terminal."""
    from jaxtrain.bench import tables
    from jaxtrain.profiling import profile_tables

    parts = [tables.TABLES[record["what"]]([record])]
    if record["what"] == "run":
        loss = record["loss"]
        parts += [tables.memory([record]), f"loss {loss['first']:.4f} at the first step, {loss['last']:.4f} at the "
                                           "last\n", *doubts(record)]
    if "profile" in record:
        parts += [profile_tables.profiles([record]), profile_tables.kernels(record["profile"])]
    return "\n".join([*parts, tables.sources([record])])


def doubts(record: dict[str, Any]) -> list[str]:
    """Return the reasons to doubt the figures of a run, as text."""
    ms = record["step_ms"]
    found = []
    if ms["p90"] > 1.3 * ms["median"]:
        found.append("one step in ten took 1.3 times the median or more")
    if record["load"] > record["cores"]:
        found.append(f"other work kept the processor busy (load {record['load']} on {record['cores']} cores)")
    if "profile" in record and record["profile"]["step_ms"] > 1.3 * ms["median"]:
        found.append("the traced steps took 1.3 times as long as the measured ones or more")
    return [f"Doubtful: {'; '.join(found)}. Measure again, or more --steps.\n"] if found else []


def out_of_memory(error: BaseException) -> bool:
    """Return whether JAX or PyTorch raised this error because a device ran out of memory."""
    text = f"{type(error).__name__} {error}".lower().replace("_", " ")
    return any(words in text for words in ("resource exhausted", "outofmemory", "out of memory", "alloc failed"))


def prepare_environment(shared: bool) -> None:
    """Set what must be set before a backend starts, as `jaxtrain.main` does.

    `shared`: PyTorch will use the same device, so JAX must not reserve all of its memory.
    """
    from jaxtrain.plan.targets import claim_memory

    claim_memory()
    if shared:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _count(run: Any) -> int:
    import jax

    return sum(leaf.size for leaf in jax.tree.leaves(run.abstract.params))

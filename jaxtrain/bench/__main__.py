"""Measure a config's training speed on this machine, and where the time goes.

    jaxtrain bench --config=configs/gpt.py --steps=20 --profile
    jaxtrain bench --config=configs/gpt.py --steps=20 --compare=step,plain
    jaxtrain bench --config=configs/gpt.py:tiny --steps=10 --sweep train.remat=none,full train.unroll=1,0
    jaxtrain bench --render docs/measurements/cpu.jsonl

Trains on packed batches of the config's own data, with its data loader, and writes no checkpoints. Exit status 0; 1: it
ran out of memory, or all runs of a sweep failed; 2: a user error, reported in one line; 130: stopped by Ctrl-C.
"""

import argparse
import os
import re
import signal
import sys
from typing import Any

from jaxtrain.base.annotations import JsonObject
from jaxtrain.errors import UserError, say
from jaxtrain.flags import add_config, add_process_flags, command, need_config, overrides_of, parser_of
from jaxtrain.redaction import redacted


@command()
def main(argv: list[str] | None) -> None:
    """Measure, sweep or render, as the flags say."""
    argv = sys.argv[1:] if argv is None else argv
    flags, words = parser().parse_known_args(argv)
    overrides = overrides_of(words, vars(flags))
    if flags.render:
        from jaxtrain.bench import tables

        if flags.into:
            say(f"{tables.fill(flags.into, flags.render)} tables written into {flags.into}")
        else:
            print(tables.render(flags.render), end="")
        return
    if flags.into:
        raise UserError("--into", "it needs --render", "give --render FILE... too")
    need_config(flags)
    for name in ("steps", "warmup"):
        if getattr(flags, name) < 1:
            raise UserError(f"--{name}", f"{getattr(flags, name)} is too few", "give 1 or more")
    if flags.timeout <= 0:
        raise UserError("--timeout", f"{flags.timeout:g} seconds is too short", "give more than 0")
    if flags.label and not re.fullmatch(r"\S+", flags.label):
        raise UserError("--label", f"{flags.label!r} is not one word", "leave out the spaces")
    if flags.json:
        from jaxtrain.bench import records

        records.writable(flags.json)
    prepare_environment(shared="torch" in flags.compare)
    if flags.sweep:
        from jaxtrain.bench import sweep

        if flags.num_processes:
            raise UserError("--sweep", "it starts its own processes", "leave --num_processes out")
        if flags.compare or flags.name:
            raise UserError("--sweep", f"it ranks runs, and {'--compare' if flags.compare else '--name'} takes one run",
                            "leave one of them out")
        found = sweep.sweep(_others(argv, flags.sweep), flags.sweep, flags.json, flags.timeout)
        print(sweep.ranked(found), end="")
        if all("failed" in record for record in found):
            raise SystemExit(1)
        return
    from jaxtrain.bench import records
    from jaxtrain.distributed import processes

    record = measured(flags, overrides, argv)
    if processes.process() == 0:
        if "failed" not in record:
            print(shown(record), end="", flush=True)
        if flags.json:
            records.append(flags.json, record)
    if "failed" in record:
        say(record["failed"])
        raise SystemExit(1)


def measured(flags: argparse.Namespace, overrides: dict[str, str], argv: list[str]) -> JsonObject:
    """Run one measurement and return its record."""
    import jax

    from jaxtrain import compile_cache
    from jaxtrain.bench import contenders, records
    from jaxtrain.bench.compare import compare
    from jaxtrain.bench.measurement import measure
    from jaxtrain.builder import build
    from jaxtrain.config.load import load_config
    from jaxtrain.distributed import processes
    from jaxtrain.plan import preflight

    names = contenders.named(flags.compare)
    if names and flags.profile:
        raise UserError("--profile", "a comparison cannot be profiled", "leave one of them out")
    if names and flags.targets:
        raise UserError("--targets", "a comparison makes no predictions", "leave one of them out")
    compile_cache.enable_compilation_cache()
    processes.initialize(flags.coordinator, flags.num_processes, flags.process_id)
    if names and processes.processes() > 1:
        raise UserError("--compare", "several processes cannot be compared", "compare in one process")
    config = load_config(flags.config, overrides)
    processes.agree(config)
    if config.reinforce.prompts:
        raise UserError("reinforce.prompts", "a bench has no answers of the model to train on", "train some steps with "
                        "jaxtrain.main: metrics.jsonl has rollout_s, reward_s and step_time_s of each")
    if config.preference.reference == "precomputed":
        raise UserError("preference.reference", "a bench does not compute the reference's numbers before its steps",
                        "measure with a copy: preference.reference=copy")
    run = build(preflight.resolve(config, jax.devices()))
    contenders.refuse(names, run)
    processes.connect(config.resilience.start_limit)
    if flags.targets is None and (predicted := preflight.check(run)) and jax.process_index() == 0:
        say(predicted)
    record = {"what": "compare" if names else "run", "label": flags.label,
              "name": flags.name or " ".join([flags.config, *(f"{key}={value}" for key, value in
                                                              redacted(overrides).items())]),
              **records.about(records.command_line("-m jaxtrain.bench", argv)), **described(run),
              "steps": flags.steps, "warmup": flags.warmup}
    try:
        if names:
            return record | compare(run, names, flags.steps, flags.warmup)
        return record | measure(run, flags.steps, flags.warmup, traced=flags.profile, file=flags.targets)
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


def described(run: Any) -> JsonObject:
    """Describe what was measured: the model, mesh, batch and other settings, for the record."""
    c = run.config
    return {"config_hash": c.hash(), "model": c.model.name, "parameters": _count(run),
            "precision": run.sharded.settings.precision,
            "mesh": {axis: size for axis, size in run.mesh.shape.items() if size > 1},
            "rows": c.data.global_batch_size, "seq_len": c.data.seq_len, "accumulation": c.train.accumulation,
            "remat": c.train.remat, "unroll": c.train.unroll, "offload": c.optimizer.offload,
            "optimizer": c.optimizer.name}


def shown(record: JsonObject) -> str:
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


def doubts(record: JsonObject) -> list[str]:
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


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = parser_of("bench", __doc__)
    add_config(made)
    made.add_argument("--steps", type=int, default=50, help="steps to measure; default 50")
    made.add_argument("--warmup", type=int, default=5, help="unmeasured warmup steps; default 5")
    made.add_argument("--profile", action="store_true",
                      help="also profile a few steps: time by kind of operation and by kernel")
    made.add_argument("--compare", default="", metavar="NAME,...",
                      help="compare with other implementations of the same model, in alternation: step, plain, torch, "
                           "torch.compile,  "
                           "torch.causal (explained in docs/measuring.md)")
    made.add_argument("--sweep", nargs="+", default=[], metavar="KEY=V1,V2",
                      help="measure every combination of these keys' values, one process each, and rank them")
    made.add_argument("--timeout", type=float, default=1800,
                      help="time limit of each process of a sweep in seconds; default 1800")
    add_process_flags(made)
    made.add_argument("--targets", metavar="FILE", help="measurements of jaxtrain calibrate, for the predictions")
    made.add_argument("--json", metavar="FILE", help="append the measurement to this file as a line of JSON")
    made.add_argument("--name", help="name of the measurement in tables; default: the config and its changes")
    made.add_argument("--label", help="name of the table for the measurement, one word; see --into")
    made.add_argument("--render", nargs="+", metavar="FILE", help="print tables of the measurements in --json files")
    made.add_argument("--into", metavar="DOCUMENT",
                      help="with --render: write the tables into this document, between lines '<!-- rendered: KIND "
                           "LABEL -->' and '<!-- end -->'; KIND is run, memory, compare, profile or figures")
    made.group("what is measured", "steps", "warmup", "profile", "compare", "sweep", "timeout", "targets")
    made.group("records and tables", "json", "name", "label", "render", "into")
    return made


def _others(argv: list[str], swept: list[str]) -> list[str]:
    """Return the flags without those of a sweep, for each of its processes."""
    own, skip = [], False
    for word in argv:
        if word.startswith("-"):
            skip = word.partition("=")[0] in ("--sweep", "--json", "--timeout")
        if not (skip or word in swept):
            own.append(word)
    return own


def _count(run: Any) -> int:
    import jax

    return sum(leaf.size for leaf in jax.tree.leaves(run.abstract.params))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its processes and files are removed
    sys.exit(main())

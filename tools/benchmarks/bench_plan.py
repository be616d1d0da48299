"""Compare what the planner predicts of memory and collectives with what the real compilers say.

    python tools/benchmarks/bench_plan.py

Every case is traced and, for the same devices, compiled ahead of time: no accelerator is needed. Prints the table of
docs/planner.md. `--cases=h200` takes those whose name contains it; results are kept in a file and not compiled again.
"""

import argparse
import json
import statistics
import sys
import traceback
from pathlib import Path

from jaxtrain.config.load import load_config
from jaxtrain.config.schema import Config
from jaxtrain.plan.compiler import compile_answering, compile_step
from jaxtrain.plan.estimate import Estimate, estimate
from jaxtrain.plan.targets import TARGETS

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "tests" / "plan" / "compiled.jsonl"
ONE = {"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 1, "mesh.stage": 1, "mesh.context": 1, "mesh.expert": 1,
       "train.accumulation": 1, "train.precision": "bfloat16"}


def case(name: str, config: str, target: str, devices: int, rows: int, seq_len: int, **keys) -> dict:
    """One line of the table; mesh axes and others by their last names."""
    names = {"remat": "train.remat", "accumulation": "train.accumulation", "zero": "optimizer.zero_stage",
             "schedule": "pipeline.schedule", "microbatches": "pipeline.microbatches",
             "strategy": "mesh.context_strategy", "layers": "model.num_layers", "attention": "train.attention",
             "offload": "optimizer.offload", "rank": "lora.rank", "quantize": "lora.quantize",
             "frozen": "train.frozen_dtype", "unroll": "train.unroll", "buffer": "train.expert_buffer"}
    overrides = {**ONE, "data.global_batch_size": rows, "data.seq_len": seq_len,
                 **{names.get(key, f"mesh.{key}"): value for key, value in keys.items()}}
    return {"name": name, "config": config, "target": target, "devices": devices, "overrides": overrides}


H200 = [
    *(case(f"8B h200 fsdp8 {remat}", "llama3_8b", "h200", 8, 8, 4096, fsdp=8, remat=remat)
      for remat in ("none", "full", "attention", "attention_and_dots", "dots")),
    *(case(f"8B h200 {mesh}", "llama3_8b", "h200", 8, 16, 4096, remat="full", **mesh)
      for mesh in ({"tensor": 8}, {"data": 8}, {"data": 8, "zero": 1}, {"data": 2, "fsdp": 4},
                   {"fsdp": 4, "tensor": 2}, {"fsdp": 4, "context": 2}, {"fsdp": 4, "context": 2, "strategy": "ring"},
                   {"data": 4, "stage": 2, "microbatches": 4}, {"fsdp": 8, "accumulation": 2})),
    case("8B h200 fsdp8 offload", "llama3_8b", "h200", 8, 8, 4096, fsdp=8, remat="full", offload=True),
    case("70B h200 8 offload {'fsdp': 2, 'tensor': 4}", "llama3_70b", "h200", 8, 8, 4096, remat="full", fsdp=2,
         tensor=4, offload=True),
    # Layers that do not divide over the stages.
    case("8B 30 layers h200 {'fsdp': 2, 'stage': 4}", "llama3_8b", "h200", 8, 16, 4096, remat="full", layers=30, fsdp=2,
         stage=4, microbatches=8),
    *(case(f"70B h200 {devices} {mesh}", "llama3_70b", "h200", devices, devices, 8192, remat=remat, **mesh)
      for devices in (64, 256, 512)
      for remat, mesh in (("full", {"fsdp": devices}), ("attention", {"fsdp": devices // 8, "tensor": 8}),
                          ("full", {"fsdp": devices // 32, "tensor": 4, "stage": 8, "microbatches": 16}))),
    *(case(f"405B h200 {devices} {mesh}", "llama3_405b", "h200", devices, devices, 8192, remat="full", **mesh)
      for devices, mesh in ((512, {"fsdp": 64, "tensor": 8}), (2048, {"data": 2, "fsdp": 128, "tensor": 8}))),
    *(case(f"mixtral h200 {mesh}", "mixtral_8x7b", "h200", 32, 32, 4096, remat="full", **mesh)
      for mesh in ({"fsdp": 32}, {"fsdp": 4, "expert": 8}, {"fsdp": 4, "expert": 4, "tensor": 2})),
]
QLORA = [case(f"{size} {quantize} h100", f"llama3_{size.lower()}", "h100", 1, 1, 2048, remat="full", rank=16,
              quantize=quantize, frozen="bfloat16", unroll=1)
         for size, quantize in (("8B", "nf4"), ("8B", "int8"), ("70B", "nf4"))]
TPU = [  # where attention keeps all scores of a layer: rows of 4,096
    *(case(f"8B v5p fsdp8 {remat}", "llama3_8b", "v5p", 8, 8, 4096, fsdp=8, remat=remat)
      for remat in ("full", "attention", "dots")),
    *(case(f"8B v6e {mesh}", "llama3_8b", "v6e", 16, 16, 2048, remat="full", **mesh)
      for mesh in ({"fsdp": 16}, {"tensor": 8, "fsdp": 2}, {"fsdp": 4, "tensor": 4})),
    *(case(f"70B v5p {devices} {mesh}", "llama3_70b", "v5p", devices, devices, 4096, remat="full", **mesh)
      for devices, mesh in ((64, {"fsdp": 64}), (64, {"fsdp": 8, "tensor": 8}), (256, {"fsdp": 256}),
                            (256, {"fsdp": 32, "tensor": 8}), (256, {"fsdp": 8, "tensor": 4, "stage": 8}))),
    *(case(f"mixtral v5p {mesh}", "mixtral_8x7b", "v5p", 32, 32, 4096, remat="full", **mesh)
      for mesh in ({"fsdp": 32}, {"fsdp": 4, "expert": 8})),
    case("qwen3 0.6B v5e fsdp4", "qwen3_0p6b", "v5e", 4, 8, 2048, fsdp=4, remat="full"),
    *(case(f"8B v5e fsdp8 offload {remat}", "llama3_8b", "v5e", 8, 8, 2048, fsdp=8, remat=remat, offload=True)
      for remat in ("full", "attention")),
]
HYBRIDS = [
    case("9B Qwen3.5 h100 fsdp8", "qwen3_5_9b", "h100", 8, 8, 8192, remat="full", fsdp=8),
    case("9B Qwen3.5 v5p fsdp8", "qwen3_5_9b", "v5p", 8, 8, 4096, remat="full", fsdp=8),
    case("8B Nemotron-H h100 fsdp8", "nemotron_h_8b", "h100", 8, 8, 8192, remat="full", fsdp=8),
    case("48B Kimi Linear h100 {'fsdp': 8, 'expert': 8}", "kimi_linear_48b", "h100", 64, 64, 8192, remat="full",
         fsdp=8, expert=8),
]
CASES = [*H200, *QLORA, *HYBRIDS, *TPU]
ANSWERS_KEPT = KEPT.with_name("compiled_answers.jsonl")
LEARNING = {"rl.prompts": "prompts.jsonl", "rl.reward": "reward.py:reward", "train.eval_every": 0,
            "train.sample_tokens": 0, "checkpoint.best": ""}


def answers(name: str, config: str, target: str, devices: int, rows: int, seq_len: int, **keys) -> list[dict]:
    """Two cases of answers that are half as long as rows: with weights as they rest, and gathered once."""
    found = [case(f"{name}{how}", config, target, devices, rows, seq_len, remat="full", **keys)
             for how in ("", " gathered")]
    for gather, one in enumerate(found):
        one["overrides"] |= LEARNING | {"rl.max_new_tokens": seq_len // 2,
                                        "rl.gather_weights": bool(gather)}
    return found


ANSWERS = [
    *answers("GPT-2 124M h200 fsdp8", "gpt.py:124m", "h200", 8, 512, 1024, fsdp=8),
    *answers("8B h200 fsdp8", "llama3_8b.py", "h200", 8, 64, 2048, fsdp=8),
    *answers("8B h200 {'fsdp': 4, 'tensor': 2}", "llama3_8b.py", "h200", 8, 64, 2048, fsdp=4, tensor=2),
    *answers("Gemma 3 1B h200 fsdp4", "gemma3_1b.py", "h200", 4, 64, 2048, fsdp=4),
    *answers("DeepSeek-V3 8 layers h200 {'fsdp': 8, 'expert': 8}", "deepseek_v3.py", "h200", 64, 512, 2048, fsdp=8,
             expert=8, layers=8, buffer=2.0),
    *answers("8B v5p fsdp8", "llama3_8b.py", "v5p", 8, 64, 2048, fsdp=8),
]


def predicted(one: dict) -> Estimate:
    """Return the planner's estimate of a case."""
    return estimate(config_of(one), TARGETS[one["target"]], one["devices"])


def config_of(one: dict) -> Config:
    """Return the config of a case."""
    file, _, variant = one["config"].partition(".py:")
    return load_config(f"{ROOT / 'configs' / file.removesuffix('.py')}.py{variant and f':{variant}'}", one["overrides"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", default="", help="those whose name contains this")
    parser.add_argument("--answers", action="store_true", help="what answers take, by phase, in place of steps")
    parser.add_argument("--kept", type=Path, default=KEPT, help="what compilers said before")
    flags = parser.parse_args()
    if flags.answers:
        return compare_answers(flags.cases)
    kept = {}
    if flags.kept.exists():
        kept = {line["name"]: line for line in map(json.loads, flags.kept.read_text().splitlines())}
    errors, talk = [], []
    print("| case | predicted GB | compiled GB | error | collectives predicted GB | compiled GB | error |")
    print("|---|---|---|---|---|---|---|")
    for one in CASES:
        if flags.cases not in one["name"]:
            continue
        try:
            guess = predicted(one)
            if one["name"] not in kept:
                real = compile_step(config_of(one), TARGETS[one["target"]], one["devices"])
                kept[one["name"]] = {"name": one["name"], "bytes": real.bytes,
                                     "allocated": real.allocated, "seconds": real.seconds,
                                     "talked": [[kind, list(axes), size] for (kind, axes), size in real.talked.items()]}
                with open(flags.kept, "a") as file:
                    file.write(json.dumps(kept[one["name"]]) + "\n")
        except Exception as error:
            traceback.print_exc()
            print(f"| {one['name']} | {type(error).__name__}: {f'{error}'.splitlines()[0][:150]} |", flush=True)
            continue
        real = kept[one["name"]]
        moved = sum(size for _, _, size in real["talked"])
        errors.append(guess.bytes / real["bytes"] - 1)
        talk.append(guess.talked.total() / moved - 1 if moved else 0.0)
        print(f"| {one['name']} | {guess.bytes / 1e9:.2f} | {real['bytes'] / 1e9:.2f} | {errors[-1]:+.1%} | "
              f"{guess.talked.total() / 1e9:.2f} | {moved / 1e9:.2f} | {talk[-1]:+.1%} |", flush=True)
    for what, found in (("memory", errors), ("collectives", talk)):
        if found:
            sizes = sorted(map(abs, found))
            print(f"\n{what}: {len(found)} cases, median error {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}")
    return 0


def compare_answers(cases: str) -> int:
    """Print the table of what a device holds in each phase of answering; compile what was not kept."""
    kept = {}
    if ANSWERS_KEPT.exists():
        kept = {line["name"]: line["bytes"] for line in map(json.loads, ANSWERS_KEPT.read_text().splitlines())}
    print("| case | phase | predicted GB | compiled GB | error |\n|---|---|---|---|---|")
    errors = []
    for one in (one for one in ANSWERS if cases in one["name"]):
        if one["name"] not in kept:
            kept[one["name"]] = compile_answering(config_of(one), TARGETS[one["target"]], one["devices"])
            with open(ANSWERS_KEPT, "a") as file:
                file.write(json.dumps({"name": one["name"], "bytes": kept[one["name"]]}) + "\n")
        guess = predicted(one).answering
        for phase, real in kept[one["name"]].items():
            errors.append(guess[phase].total() / real - 1)
            print(f"| {one['name']} | {phase} | {guess[phase].total() / 1e9:.2f} | {real / 1e9:.2f} | "
                  f"{errors[-1]:+.1%} |", flush=True)
    sizes = sorted(map(abs, errors))
    print(f"\n{len(sizes)} programs, median error {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare the planner's step times with results that others have published.

    python tools/benchmarks/bench_published.py

Every row is somebody's run, written as a jaxtrain config of the same shapes, batch and layout, so an error holds three
things: the time model's, that of an assumption about their run, and that their program is not ours. Rows take turns:
the constants of jaxtrain/plan/cost/rates.py were chosen on those called calibrated, and those held out say how far that
carries. They do not say it quite cleanly: their errors under the first, uncalibrated constants were looked at too, and
helped to see that GPUs hide little talk. So there are rows called later, which were written down and predicted after
the last constant. No accelerator is needed.

Predicted is what jaxtrain's own code would do there: attention is cuDNN's kernel on GPUs and splash attention on TPUs,
kernels like theirs.

Whole steps of jaxtrain's own that were measured on one H200 (docs/measurements/h200.jsonl) are rows as well, called
measured; the rates of H200 come from their profiles.

`--rows=v6e` takes those whose name contains it, `--half=calibrated` one half; `--parts` says where time goes, and
`--update` records what is published and predicted in docs/measurements/published.json, for bench_held_out.py.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtrain.config.load import load_config
from jaxtrain.plan.estimate import Estimate, estimate
from jaxtrain.plan.targets import TARGETS, GiB, Target

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "measurements" / "published.json"
LLAMA2 = {"model.vocab_size": 32000, "model.rope_theta": 10_000.0, "model.rope_scaling": 1.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # file of configs/, and what to change in it
    "Llama-2 7B": ("llama3_8b", {**LLAMA2, "model.num_kv_heads": 32, "model.mlp_dim": 11008}),
    "Llama-2 13B": ("llama3_8b", {**LLAMA2, "model.num_layers": 40, "model.embed_dim": 5120, "model.num_heads": 40,
                                  "model.num_kv_heads": 40, "model.mlp_dim": 13824}),
    "Llama-2 70B": ("llama3_70b", LLAMA2),
    "Llama-3.1 8B": ("llama3_8b", {}),
    "Llama-3.1 70B": ("llama3_70b", {}),
    "Llama-3.1 405B": ("llama3_405b", {}),
    "Mixtral 8x7B": ("mixtral_8x7b", {}),
    "Qwen3-30B-A3B": ("qwen3_30b_a3b", {"optimizer.moment_dtype": "bfloat16"}),
}


def _like(name: str, network: float = 0.0, **changes: Any) -> Target:
    """A target of the table that somebody's machine differs from, as they describe it; `network`: of a device."""
    target = TARGETS[name]
    if network:
        target = dataclasses.replace(target, links=(
            target.links[0], dataclasses.replace(target.links[1], bandwidth=network)))
    return dataclasses.replace(target, **changes)


# Google's A3 machines have four network cards of 200 Gb/s for eight GPUs.
A3 = _like("h100", network=100e9 / 8)
# Of torchtitan's GPUs its authors say: 96 GB of HBM2e at 2.4 TB/s, 500 W instead of 700 W, and a peak between that of
# SXM and NVL. Above some 100 W that do not depend on the clock, power grows with about its power of 2.5:
# (400 / 600)^(1/2.5) = 0.85 of the clock.
GRAND_TETON = _like("h100", memory=96 * GiB, bandwidth=2.4e12,
                    peak={dtype: 0.85 * peak for dtype, peak in TARGETS["h100"].peak.items()})
# IBM's machines have 800 Gb/s for eight H100, and 400 Gb/s for eight A100.
VELA_H100, VELA_A100 = _like("h100", network=100e9 / 8), _like("a100", network=50e9 / 8)
V6E = TARGETS["v6e"]


@dataclass(frozen=True)
class Step:
    """A whole step of jaxtrain's that was measured on one H200, as a config of today's keys."""

    name: str  # in docs/measurements/h200.jsonl
    config: str
    keys: Mapping[str, Any]

    def predict(self) -> list[Estimate]:
        """Return the estimate of this step."""
        file, _, variant = self.config.partition(":")
        keys = {"train.accumulation": 1, "mesh.data": 1, "mesh.fsdp": 1, "train.attention": "cudnn", **self.keys}
        path = f"{ROOT / 'configs' / file}.py{variant and f':{variant}'}"
        return [estimate(load_config(path, keys), TARGETS["h200"], 1)]

    def measured(self) -> float:
        """Return the median seconds of the step."""
        lines = map(json.loads, (ROOT / "docs/measurements/h200.jsonl").read_text().splitlines())
        return next(line["step_ms"]["median"] / 1e3 for line in lines if line["name"] == self.name and
                    line.get("profile"))


@dataclass(frozen=True)
class Row:
    """One published result. `rows`: sequences of one device; `printed` counts what `unit` says."""

    system: str
    model: str
    target: Target
    devices: int
    seq_len: int
    rows: float
    remat: str  # "a/b": halfway, where half of the matmuls are kept
    printed: float
    unit: str  # "tokens" a second and device, "TFLOP/s" or "MFU" with attention counted as full, "seconds" of a step
    source: str
    assumed: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)  # fsdp over all devices where it says nothing
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name that the table has for it."""
        return f"{self.system} {self.model}, {self.devices} {self.target.name}"

    def predict(self) -> list[Estimate]:
        """Return the estimate of this row; two where it lies halfway between."""
        file, changes = MODELS[self.model]
        axes = {"data": 1, "fsdp": 1, "stage": 1, "context": 1, "expert": 1, "tensor": 1,
                **(self.mesh or {"fsdp": self.devices})}
        batch = {"data.seq_len": self.seq_len, "data.global_batch_size": round(self.rows * self.devices)}
        found = []
        for remat in self.remat.split("/"):
            train = {"train.accumulation": 1, "train.precision": "bfloat16", "train.remat": remat,
                     "train.loss_chunks": 1}  # most of them hold all logits
            if self.target.platform == "cuda":
                train |= {"train.attention": "cudnn", "data.cross_document_attention": True}
            config = load_config(ROOT / "configs" / f"{file}.py", {
                **changes, **{f"mesh.{axis}": size for axis, size in axes.items()}, **batch, **train, **self.more})
            found.append(estimate(config, self.target, self.devices))
        return found

    def published(self, guess: Estimate) -> float:
        """Tokens a second and device."""
        tokens = self.seq_len * self.rows
        if self.unit == "tokens":
            return self.printed
        if self.unit == "seconds":
            return tokens / self.printed
        model = guess.config.model
        full = guess.useful / tokens + 6 * model.num_layers * model.num_heads * model.head_dim * self.seq_len
        return self.printed * (1e12 if self.unit == "TFLOP/s" else TARGETS[self.target.name].peak["bfloat16"]) / full


A3_README = "maxtext configs/gpu/a3/llama_2_7b/README.md"
TITAN = "torchtitan benchmarks/llama3_h100_202412, asyncTP_llama3_h100_2025-06"
TITAN_A100 = "torchtitan docs/performance.md"
RECIPE = "tpu-recipes training/trillium"
TIERING = "maxtext docs/reference/models/tiering.md"
# By turns calibrated and held out, in an order that was fixed before the first prediction (the last two were added
# later, before theirs): GPUs and TPUs, small and large, are in both halves.
ROWS = [
    Row("KempnerForge", "Llama-3.1 8B", TARGETS["h200"], 1, 4096, 8, "full", 10_471, "tokens",
        "KempnerForge benchmarks/mfu_scaling", more={"train.accumulation": 2}),
    Row("MaxText (JAX-Toolbox)", "Llama-2 7B", TARGETS["h100"], 8, 4096, 2, "attention_and_dots", 11_361, "tokens",
        "JAX-Toolbox docs/frameworks/maxtext/README.md"),
    *(Row("MaxText A3", "Llama-2 7B", A3, 8 * nodes, 4096, 4, "attention_and_dots", printed, "TFLOP/s", A3_README,
          mesh={"data": nodes, "fsdp": 8})
      for nodes, printed in ((1, 492), (2, 422), (4, 407), (8, 409), (16, 375))),
    Row("torchtitan", "Llama-3.1 8B", GRAND_TETON, 8, 8192, 2, "attention/attention_and_dots", 6_667, "tokens", TITAN),
    Row("torchtitan", "Llama-3.1 8B", GRAND_TETON, 128, 8192, 2, "attention/attention_and_dots", 6_514, "tokens",
        TITAN),
    Row("torchtitan TP", "Llama-3.1 8B", GRAND_TETON, 64, 8192, 12 / 8, "attention/attention_and_dots", 4_378,
        "tokens", TITAN, mesh={"fsdp": 8, "tensor": 8}),
    Row("torchtitan TP", "Llama-3.1 70B", GRAND_TETON, 256, 8192, 16 / 8, "full", 597, "tokens", TITAN,
        mesh={"fsdp": 32, "tensor": 8}),
    # Predicted at first with 50 GB/s between machines, an assumption: +31 %. Their README says 800 Gb/s for a machine.
    Row("fms-fsdp", "Llama-2 7B", VELA_H100, 96, 4096, 2, "none", 7_500, "tokens", "fms-fsdp README",
        mesh={"data": 12, "fsdp": 8}),
    Row("AXLearn", "Llama-2 7B", TARGETS["h100"], 256, 4096, 4, "attention_and_dots", 1.4, "seconds",
        "arXiv 2507.05411", "fsdp over all; products kept"),
    Row("AXLearn", "Llama-2 70B", TARGETS["h100"], 512, 4096, 2, "attention", 9.2, "seconds",
        "arXiv 2507.05411", "fsdp over all; attention kept"),
    Row("MaxText", "Llama-2 70B", TARGETS["v5p"], 256, 4096, 4, "full", 0.654, "MFU", TIERING,
        "of v5p-512; their remat keeps all but the MLP's first products"),
    Row("MaxText A3-Ultra", "Llama-3.1 70B", TARGETS["h200"], 256, 8192, 2, "attention", 1_056, "tokens",
        "gpu-recipes training/a3ultra/llama3-1-70b", "their remat keeps attention's products too"),
    Row("MaxText", "Llama-3.1 8B", V6E, 8, 8192, 3, "full", 7_139, "tokens", f"{RECIPE}/Llama3.1-8B-MaxText/v6e-8",
        "they keep attention's products on the host"),
    Row("MaxText", "Llama-3.1 8B", V6E, 256, 8192, 4, "full", 7_207, "tokens",
        f"{RECIPE}/Llama3.1-8B-MaxText/v6e-256", "they keep attention's products on the host"),
    Row("MaxText", "Llama-3.1 70B", V6E, 256, 8192, 5, "full", 960, "tokens",
        f"{RECIPE}/Llama3.1-70B-MaxText/v6e-256", "they keep attention's first products on the host"),
    Row("MaxText", "Llama-2 70B", V6E, 256, 4096, 3, "full", 905, "tokens", f"{RECIPE}/Llama2-70B-MaxText",
        "they keep attention's first products on the host"),
    Row("MaxText", "Llama-3.1 405B", V6E, 256, 8192, 1, "full", 0.3855, "MFU", TIERING, "1 row a device"),
    Row("MaxText, 2 slices", "Llama-3.1 405B", V6E, 512, 8192, 1, "full", 149.5, "tokens",
        f"{RECIPE}/Llama3.1-405B-MaxText"),
    Row("MaxText, capacity 1.25", "Mixtral 8x7B", V6E, 256, 4096, 12, "full", 3_645, "tokens",
        f"{RECIPE}/Mixtral-8x7B-MaxText", "they keep attention's products on the host; their padding by a "
        "quarter is not in ours", more={"model.capacity_factor": 1.25}),
    Row("MaxText, nothing dropped", "Mixtral 8x7B", TARGETS["v5p"], 128, 4096, 36, "full", 2_909, "tokens", TIERING,
        "of v5p-256; batch as in tpu-recipes training/v5p/Mixtral-8X7B-Maxtext"),
    Row("torchtitan", "Llama-3.1 8B", TARGETS["a100"], 64, 8192, 1, "attention/attention_and_dots", 2_973, "tokens",
        TITAN_A100, "network of 25 GB/s"),
    Row("torchtitan", "Llama-3.1 70B", TARGETS["a100"], 64, 8192, 1, "full", 331, "tokens", TITAN_A100,
        "network of 25 GB/s"),
]
DOTS = {"train.remat": "attention_and_dots", "optimizer.moment_dtype": "bfloat16", "data.seq_len": 4096}
# Chunks of the loss head as they were then.
MEASURED = [
    Step("GPT-2 124M", "gpt:124m", {"data.global_batch_size": 64, "train.remat": "none", "train.loss_chunks": 32}),
    Step("GPT-2 124M, layers in a loop", "gpt:124m", {"data.global_batch_size": 64, "train.remat": "none",
                                                      "train.loss_chunks": 32, "train.unroll": 1}),
    Step("Llama-3.2 1B", "llama3_1b", {"data.global_batch_size": 16, "data.seq_len": 4096, "train.remat": "none",
                                       "train.loss_chunks": 64}),
    Step("Llama-3.1 8B, remat=attention_and_dots, bfloat16 moments", "llama3_8b", {
        **DOTS, "data.global_batch_size": 2, "train.loss_chunks": 8}),
    Step("Qwen3-30B-A3B, 6 of 48 layers, remat=attention_and_dots, bfloat16 moments", "qwen3_30b_a3b", {
        **DOTS, "data.global_batch_size": 4, "train.loss_chunks": 16, "mesh.expert": 1, "model.num_layers": 6}),
]
KEMPNER, H200_BY_4 = "KempnerForge docs/reference/benchmarks.md", "batch as on one; 50 GB/s between machines of 4"
FOURS = dataclasses.replace(TARGETS["h200"], links=(
    dataclasses.replace(TARGETS["h200"].links[0], devices=4), TARGETS["h200"].links[1]))
LATER = [
    Row("Automodel", "Qwen3-30B-A3B", TARGETS["h100"], 8, 4096, 2, "full", 12_040, "tokens",
        "NeMo Automodel docs/performance-summary.mdx", "2 rows a device, full, experts over all eight",
        mesh={"expert": 8}),
    *(Row("KempnerForge", "Llama-3.1 8B", FOURS, devices, 4096, 8, "full", printed, "tokens", KEMPNER, H200_BY_4,
          more={"train.accumulation": 2}) for devices, printed in ((2, 9_364), (4, 9_746), (8, 0.53 * 10_471))),
    Row("fms-fsdp", "Llama-2 7B", VELA_A100, 128, 4096, 2, "none", 3_700, "tokens", "fms-fsdp README",
        mesh={"data": 16, "fsdp": 8}),
    Row("torchtitan", "Llama-2 13B", TARGETS["a100"], 64, 4096, 2, "none", 2_162, "tokens", TITAN_A100,
        "network of 25 GB/s"),
    Row("torchtitan", "Llama-2 70B", TARGETS["a100"], 64, 4096, 2, "full", 353, "tokens", TITAN_A100,
        "network of 25 GB/s"),
    Row("MaxText", "Llama-3.1 70B", V6E, 64, 8192, 2, "full", 876.7, "tokens",
        f"{RECIPE}/Llama3.1-70B-MaxText/v6e-64", "they keep attention's first products on the host"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="", help="those whose name contains this")
    parser.add_argument("--half", choices=("calibrated", "held out", "later", "measured"),
                        help="only one of them")
    parser.add_argument("--parts", action="store_true", help="say where the predicted time goes, too")
    parser.add_argument("--update", action="store_true", help="record the rows for bench_held_out.py")
    flags = parser.parse_args()
    halves = ("calibrated", "held out")
    errors, kept = defaultdict[str, list[float]](list), dict[str, dict[str, Any]]()
    print("| run | sequence | rows | remat | printed | published tokens/s/device | predicted | error | half | source |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for number, row in enumerate([*ROWS, *LATER]):
        half = "later" if row in LATER else halves[number % 2]
        if flags.rows not in row.name or flags.half not in (None, half):
            continue
        guesses = row.predict()
        predicted = row.seq_len * row.rows / statistics.mean(guess.seconds for guess in guesses)
        published = row.published(guesses[0])
        error = predicted / published - 1
        errors[half].append(error)
        kept[row.name] = {"half": half, **recorded(guesses, row.seq_len * row.rows / published)}
        fits = "" if all(guess.fits for guess in guesses) else ", does not fit"
        source = f"{row.source}; assumed: {row.assumed}" if row.assumed else row.source
        print(f"| {row.name} | {row.seq_len} | {row.rows:g} | {row.remat} | {row.printed:g} {row.unit} | "
              f"{published:,.0f} | {predicted:,.0f}{fits} | {error:+.1%} | {half} | {source} |", flush=True)
        if flags.parts:
            print(_parts(guesses[0]), flush=True)
    for step in MEASURED:
        if flags.rows not in f"jaxtrain {step.name}, 1 h200" or flags.half not in (None, "measured"):
            continue
        guesses, seconds = step.predict(), step.measured()
        error = seconds / guesses[0].seconds - 1
        errors["measured"].append(error)
        kept[f"jaxtrain {step.name}"] = {"half": "measured", **recorded(guesses, seconds)}
        print(f"jaxtrain {step.name}: {1e3 * guesses[0].seconds:.1f} ms predicted, {1e3 * seconds:.1f} measured",
              flush=True)
        if flags.parts:
            print(_parts(guesses[0]), flush=True)
    if flags.update:
        known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        RECORD.write_text(json.dumps(known | kept, indent=1) + "\n")
    for half, found in errors.items():
        sizes = sorted(map(abs, found))
        print(f"\n{half}: {len(found)} runs, median error {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}")
    return 0


def recorded(guesses: list[Estimate], seconds: float) -> dict[str, Any]:
    """Return what the fit needs of a row: the seconds that its step took, and those predicted, by what has one rate."""
    def mean(part: str) -> float:
        return statistics.mean(guess.time.parts[part] for guess in guesses)

    parts = {part: mean(part) for part in ("matmul", "attention", "memory")}
    parts["communication"] = statistics.mean(guess.seconds for guess in guesses) - sum(parts.values())
    return {"chip": guesses[0].target.name, "platform": guesses[0].target.platform,
            "experts": guesses[0].config.model.experts.num, "devices": guesses[0].devices, "seconds": seconds,
            "parts": parts}


def _parts(guess: Estimate) -> str:
    parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in guess.time.parts.most_common(6))
    hidden = guess.time.hidden.total()
    return f"    {guess.seconds:.3f} s: {parts}; hidden {hidden:.3f}; {guess.time.flops / 1e12:.0f} TFLOP"


if __name__ == "__main__":
    sys.exit(main())

"""The blocks of tools/device/accelerator.py, the most important first. A new one is a function and a line of `BLOCKS`.

A block runs in a process of its own. It measures by `session.bench`, which starts `python -m jaxtrain.bench`, or
computes by itself and records `session.figures`; never both, since a process that has used a GPU keeps its memory.
"""

import importlib.util
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from jaxtrain.bench import records, sweep, tables
from tools.device import accelerator_plans
from tools.device.accelerator_plans import CONFIGS, ONE, ROOT, check

TOY = {name: config.replace(":124m", "").replace(".py", ".py:tiny") for name, config in CONFIGS.items()}
SIZES = ("model.num_layers", "data.global_batch_size", "data.seq_len", "train.accumulation")  # not of toys
GOALS = {"124M": 0.43, "1B": 0.52, "8B": 0.60}  # causal MFU on an H100 or H200


@dataclass
class Session:
    """The session in which a block measures: results go to one file as they come."""

    results: Path
    block: str
    rehearse: bool
    about: records.Record  # commit, device and versions, as another process found them
    rehearsed: set[Any] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)  # except those by memory, which are results

    def bench(self, name: str, size: str, keys: dict[str, Any], *flags: str, steps: int = 20, seconds: float = 300,
              environment: dict[str, str] | None = None) -> records.Record:
        """Measure one of the three sizes by `python -m jaxtrain.bench`; what fails is recorded with the reason.

        A rehearsal builds the real config with these keys, so that no typo waits for the card, and measures a toy.
        """
        name = f"{'toy ' * self.rehearse}{size} {name}".strip()
        every, config = {**ONE, **keys}, CONFIGS[size]
        if self.rehearse:
            built(config, every)
            every = {key: value for key, value in every.items() if key not in SIZES}
            if "train.remat" in every:  # policies by number of layers, of which a toy has fewer: the last, for the rest
                every["train.remat"] = every["train.remat"].rpartition(",")[2]
            config, steps = TOY[size], 2
            kind = flags, bool(environment)
            if kind in self.rehearsed:  # one of a kind is enough to see that it runs
                return {"name": name, "failed": "rehearsed only"}
            self.rehearsed.add(kind)
        elif found := self.kept(("run", "compare"), name):
            self.say(f"{name}: measured at this commit before")
            return found
        argv = [f"--config={config}", *(f"--config.{key}={value}" for key, value in every.items()), *flags,
                f"--steps={steps}", f"--warmup={1 if self.rehearse else 3}", f"--name={name}", f"--label={self.block}"]
        record = {**sweep.measured(argv, seconds, environment, self.about), "name": name, "label": self.block,
                  **({"rehearsal": True} if self.rehearse else {})}
        records.append(self.results, record)
        self.say(f"{name}: {tables.outcome(record)}")
        failed = record.get("failed") or record.get("profile_failed", "")
        if failed and (self.rehearse or not failed.startswith("out of memory")):
            self.failures.append(f"{name}: {failed}")
        return record

    def kept(self, kinds: tuple[str, ...], name: str) -> records.Record | None:
        """Return what was measured under this name before, on this device at this commit (edited files are not one)."""
        commit = self.about["commit"]
        if not self.results.exists() or not commit or commit.endswith("-dirty"):
            return None
        same = {"label": self.block, "name": name, **{key: self.about[key] for key in ("commit", "device", "devices")}}
        found = [line for line in records.read(self.results) if same.items() <= line.items() and line["what"] in kinds
                 and not {"failed", "rehearsal"} & line.keys()]
        return found[-1] if found else None

    def figures(self, name: str, **figures: Any) -> None:
        """Record figures that this process measured itself."""
        records.append(self.results, {**self.about, "what": "figures", "label": self.block, "name": name,
                                      "figures": figures})
        self.say(f"{name}: {figures}")

    def say(self, text: str) -> None:
        """Report progress."""
        print(f"  {self.block}: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Block:
    """A function that measures, and the seconds after which it is ended."""

    name: str
    run: Callable[[Session], None]
    seconds: float
    timed: bool = True  # False: it may run beside others


# --------------------------------------------------------------------------------------------------------------- blocks
def alive(session: Session) -> None:
    """The doctor finds nothing wrong; a run's loss falls, and it is saved and resumed."""
    config = "configs/gpt.py:tiny" if session.rehearse else "configs/gpt.py"
    steps = 20 if session.rehearse else 100
    with tempfile.TemporaryDirectory(prefix="alive-") as workdir:
        def train(last: int) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "jaxtrain.main", f"--config={config}", f"--workdir={workdir}",
                 f"--config.train.steps={last}", "--config.optimizer.schedule=constant", "--config.train.eval_every=0",
                 "--config.train.eval_batches=1", "--config.train.sample_tokens=0", "--config.checkpoint.every=0",
                 "--config.optimizer.warmup_steps=5"], capture_output=True, text=True)
            if done.returncode:
                print(done.stderr[-3000:], file=sys.stderr)
                raise SystemExit(f"training ended with status {done.returncode}: {records.reason(done.stderr)}")
            return done.stderr

        train(steps)
        resumed = train(steps + 5)
        lines = [json.loads(line) for line in Path(workdir, "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    session.figures(config, first_loss=losses[0], last_loss=losses[-1], steps=len(losses),
                    doctor=examined())
    check(losses[-1] < 0.8 * losses[0], f"the loss did not fall: {losses[0]} to {losses[-1]}")
    check(f"resumed from step {steps}" in resumed and len(losses) == steps + 5, "it did not resume where it was saved")


def examined() -> str:
    """Return what the doctor finds wrong with this machine; it may take long, and nothing waits for all of it."""
    with tempfile.TemporaryFile("w+") as found:
        try:
            done = subprocess.run([sys.executable, "-m", "jaxtrain", "doctor", "--json"], stdout=found, timeout=60)
            end = "" if done.returncode in (0, 1) else f"ended with status {done.returncode}"
        except subprocess.TimeoutExpired:
            end = "not done within 60 s"
        found.seek(0)
        findings = [json.loads(line) for line in found.read().splitlines() if line.startswith("{")]
    wrong = [f"{one['level']} {one['check']}: {one['what']}" for one in findings if one["level"] in ("warn", "FAIL")]
    return "; ".join([*wrong, *[end] * bool(end)]) or "nothing wrong"


def truth(session: Session) -> None:
    """Losses and gradients of tiny families against those that a CPU computed in float32."""
    from tools.device import accelerator_truth as figures

    gpu = session.about["device"] != "cpu"
    cases = list(figures.cases("gpu" if gpu else "cpu", few=session.rehearse))
    left = [case for case in cases if not (
        (before := session.kept(("figures",), " ".join(case[:3]))) and before["figures"].get("right"))]
    # Most of the time is compilation: processes side by side, each with some of the cases.
    with ProcessPoolExecutor(4 if gpu else 1, multiprocessing.get_context("spawn")) as pool:
        for case, found in zip(left, pool.map(figures.judged, left), strict=True):
            name = " ".join(case[:3])
            session.figures(name, **found)
            session.failures += [name] * (not found.get("right"))


def kernels(session: Session) -> None:
    """The Mosaic kernels of attention and of grouped matmuls against plain float32, and the same bits when repeated."""
    from tools.device import accelerator_kernels

    for name, found in accelerator_kernels.judged(few=session.rehearse):
        session.figures(name, **found)
        session.failures += [name] * (not found.get("right"))
    described = target_config()
    if described:
        session.results.with_suffix(".target_config.txt").write_text(described)


def speed(session: Session, size: str, steps: int) -> None:
    """One of the three sizes at the planner's best, and where its time goes."""
    record = at_best(session, size, "--profile", steps=steps)
    if (reached := record.get("mfu")) is not None:
        session.say(f"{size}: {reached:.1%} causal MFU, goal {GOALS[size]:.0%}")


def fp8(session: Session) -> None:
    """The largest size in 8 bits."""
    at_best(session, "8B", "--profile", steps=8, **{"train.precision": "fp8"})


def experts(session: Session) -> None:
    """Measure some layers of two models of experts, all on one device: many small ones, and few large ones."""
    for size, layers in (("Qwen3-30B", 6), ("Mixtral", 2)):
        keys = {"model.num_layers": layers, "mesh.expert": 1, "data.global_batch_size": 4, "data.seq_len": 4096,
                "train.remat": "attention_and_dots", "optimizer.moment_dtype": "bfloat16"}
        session.bench(said(keys), size, keys, "--profile", steps=10)


def beside(session: Session, other: str) -> None:
    """Two sizes beside a program of PyTorch, in batches with which both fit; one program at a time, since each has a
    model and an optimizer of its own.
    """
    # The twin alone has 20 GB of state at 1B, and its compiled step keeps more than ours.
    large = "H200" in session.about["device"]
    other = other if not session.rehearse else "torch" if installed("torch") else "step"
    for size, rows, length in (("124M", 32, 1024), ("1B", 2 if large else 1, 4096)):
        keys = {"data.global_batch_size": rows, "data.seq_len": length, "train.remat": "none", "train.unroll": 0}
        session.bench(f"beside {other} {said(keys)}", size, keys, f"--compare={other}", steps=40)


def tokamax(session: Session) -> None:
    """Attention and grouped matmuls alone, beside those of tokamax."""
    from tools.device import accelerator_tokamax

    if session.rehearse and not installed("tokamax"):
        session.figures("tokamax", failed="not installed here")
        return
    for name, found in accelerator_tokamax.measured(few=session.rehearse):
        session.figures(name, **found)
        session.failures += [name] * (name.startswith("ours") and "failed" in found)


def parts(session: Session) -> None:
    """Attention, the loss head and the optimizer alone."""
    done = subprocess.run([sys.executable, "-m", "tools.device.accelerator_parts", f"--results={session.results}",
                           f"--about={json.dumps(session.about)}", *["--rehearse"] * session.rehearse], cwd=ROOT)
    check(done.returncode == 0, f"tools/device/accelerator_parts.py ended with status {done.returncode}")


def remat(session: Session) -> None:
    """Scanned or unrolled layers, what is kept, offloading."""
    for keys in ({"train.remat": "none", "train.unroll": 0}, {"train.remat": "none", "train.unroll": 1},
                 *({"train.remat": policy} for policy in ("full", "dots", "attention", "attention_and_dots")),
                 {"train.remat": "full", "optimizer.offload": True}):
        session.bench(said(keys), "1B", {"data.global_batch_size": 4, "data.seq_len": 4096, **keys}, steps=10)


def memory(session: Session) -> None:
    """Predicted and measured memory and time of ten configs, layers left out so that they compile quickly."""
    def case(size: str, rows: int, remat: str, **more: Any) -> tuple[str, dict[str, Any]]:
        length = 1024 if size == "124M" else 4096
        return size, {"data.global_batch_size": rows, "data.seq_len": length, "train.remat": remat,
                      **{key.replace("__", "."): value for key, value in more.items()}}

    for size, keys in (case("124M", 64, "none"), case("124M", 64, "full"), case("1B", 4, "none"),
                       case("1B", 16, "full"), case("1B", 8, "attention"),
                       case("1B", 16, "full", train__accumulation=4), case("1B", 4, "full", optimizer__offload=True),
                       case("8B", 4, "none", model__num_layers=4), case("8B", 4, "full", model__num_layers=8),
                       case("8B", 4, "full", model__num_layers=8, optimizer__name="adafactor")):
        session.bench(said(keys), size, keys, steps=5, seconds=120)


def calibrate(session: Session) -> None:
    """Measure what this card reaches, for the planner; keep XLA's description of it for compilers without a device."""
    file = session.results.with_suffix(".targets.json")
    done = subprocess.run([sys.executable, "-m", "jaxtrain", "calibrate", f"--output={file}",
                           *(["--quick"] if session.rehearse else ["--timeout=140"])], cwd=ROOT)
    check(done.returncode == 0, f"jaxtrain calibrate ended with status {done.returncode}")
    session.figures("efficiency", **next(iter(json.loads(file.read_text()).values()))["efficiency"])


def flags(session: Session) -> None:
    """Flags of XLA for GPUs that published recipes use, one at a time; then all that gained more than 1 %."""
    keys = accelerator_plans.best(session, "1B")[0]
    usual = session.bench("as it is", "1B", keys, steps=10)
    gained = []
    if session.rehearse:  # does XLA know all of them?
        session.bench("all flags", "1B", keys, environment=with_settings(list(FLAGS)))
    for setting in FLAGS:
        record = session.bench(setting, "1B", keys, steps=10, environment=with_settings([setting]))
        if record.get("tokens_per_s", 0) > 1.01 * usual.get("tokens_per_s", float("inf")):
            gained.append(setting)
    if len(gained) > 1:
        session.bench(" ".join(gained), "1B", keys, steps=10, environment=with_settings(gained))


FLAGS = ("--xla_disable_hlo_passes=rematerialization", "--xla_gpu_enable_triton_gemm=false",
         "--xla_gpu_enable_dus_accumulator_zero_init_elimination=true", "JAX_OPTIMIZATION_LEVEL=O1",
         "--xla_gpu_cudnn_gemm_fusion_level=2", "--xla_gpu_enable_command_buffer=",
         "--xla_gpu_memory_limit_slop_factor=115", "--xla_gpu_exhaustive_tiling_search=true")  # the slowest last
BLOCKS = {block.name: block for block in (
    # The first ten minutes: whole steps with our kernels, 8 bits, and what others reach.
    *(Block(size, partial(speed, size=size, steps=steps), seconds)
      for size, steps, seconds in (("124M", 50, 80), ("1B", 20, 80), ("8B", 8, 110))),
    Block("fp8", fp8, 90), Block("beside", partial(beside, other="torch.compile"), 180), Block("tokamax", tokamax, 60),
    Block("alive", alive, 180, timed=False), Block("truth", truth, 300, timed=False),
    Block("kernels", kernels, 300, timed=False),
    Block("causal", partial(beside, other="torch.causal"), 200), Block("parts", parts, 200),
    Block("experts", experts, 240), Block("calibrate", calibrate, 200), Block("remat", remat, 300),
    Block("memory", memory, 400), Block("flags", flags, 600))}


# -------------------------------------------------------------------------------------------------------- what they use
def at_best(session: Session, size: str, *flags: str, steps: int, **more: Any) -> records.Record:
    """Measure a size at the planner's best, or the next best where that runs out of memory after all."""
    record: records.Record = {}
    for keys in accelerator_plans.best(session, size):
        keys = {**keys, **more}
        record = session.bench(said(keys), size, keys, *flags, steps=steps)
        if not record.get("failed", "").startswith("out of memory"):
            break
    return record


def built(config: str, keys: dict[str, Any]) -> None:
    """Build the real config for one GPU that is not here: whatever would be refused there is refused now."""
    import jaxtrain as jt

    jt.build(jt.load_config(ROOT / config, keys), devices=1, platform="cuda")


def with_settings(settings: list[str]) -> dict[str, str]:
    """Environment variables for flags of XLA, and for NAME=VALUE."""
    xla = " ".join(setting for setting in settings if setting.startswith("--"))
    others = dict(setting.split("=", 1) for setting in settings if not setting.startswith("--"))
    return {**others, **({"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {xla}".strip()} if xla else {})}


def target_config() -> str:
    """Return XLA's description of this GPU, as text for `jaxtrain.plan.compiler`; nothing for other devices."""
    with tempfile.TemporaryDirectory(prefix="described-") as folder:
        code = "import jax; print(jax.jit(lambda x: x * 2)(1.0))"
        subprocess.run([sys.executable, "-c", code], env=os.environ | with_settings([f"--xla_dump_to={folder}"]),
                       capture_output=True)
        files = sorted(Path(folder).glob("*gpu_target_config.pbtxt"))
        return files[0].read_text() if files else ""


def said(keys: dict[str, Any]) -> str:
    """Keys without their sections, for the name of a measurement."""
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in keys.items())


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def timed(call: Callable[[], Any], repeats: int = 10) -> Iterator[float]:
    """Seconds of each call, behind one that compiles and one that warms up."""
    import jax

    for turn in range(repeats + 2):
        began = time.perf_counter()
        jax.block_until_ready(call())
        if turn > 1:
            yield time.perf_counter() - began


def median_seconds(call: Callable[[], Any], repeats: int = 10) -> float:
    """The median time of a call."""
    return statistics.median(timed(call, repeats))

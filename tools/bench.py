"""What jaxtrain costs beside the same model written by hand, in JAX and in PyTorch (tools/reference/).

    python tools/bench.py --compare=plain [--shape=g1|g2|default] [--steps=N] [--unroll=0,1]
    python tools/bench.py --compare=torch ...      needs torch
    python tools/bench.py --first_step             from the start of the process to the end of the first step
    python tools/bench.py --import_time            CPU seconds
    python tools/bench.py --losses [--steps=N]     the same weights and data: how far do the losses lie apart?

`--compare` runs the whole of `jaxtrain.train`: packed text through the loader and its thread, metrics.jsonl written at
every step. Where its loop asks for the batch after a block of steps, the clock stops, the others run as many steps on
the same batches (placed ahead of time, loss read one step late), and the loop goes on. So all contenders share a
process and whatever else the machine does at that minute. CPU ms are of all threads: steadier on a shared machine.
"""

import argparse
import contextlib
import importlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SHAPES = {  # layers, width, heads, context, sequences; steps to time
    "g1": (4, 128, 4, 64, 12, 400), "g2": (6, 384, 6, 256, 8, 60), "default": (4, 128, 4, 256, 8, 200),
    "tiny": (2, 32, 2, 32, 4, 200),
}
WARM_UP = 5  # steps before the first block: caches fill, and the import of Orbax on a thread of its own is over
PAUSE = 0.1  # seconds between blocks: nobody's threads still spin


def make_config(shape: str, steps: int, unroll: int = 0, **data):
    import jaxtrain as jt

    layers, width, heads, context, sequences, _ = SHAPES[shape]
    return jt.make_config({
        "model": {"vocab_size": 320, "num_layers": layers, "embed_dim": width, "num_heads": heads,
                  "max_seq_len": context},
        "data": {"seq_len": context, "global_batch_size": sequences, **data},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": min(10, steps)},
        "train": {"steps": steps, "unroll": unroll, "precision": "float32", "eval_batches": 1},
    })


# ------------------------------------------------------------------------------------------------ the other contenders
class Contender:
    """Trains as the run does. `issue(batch)` begins a step, `read` of what it returned waits for the loss."""

    def __init__(self, issue, read, place, evaluate):
        self.issue, self.read, self.place, self.evaluate = issue, read, place, evaluate

    def steps(self, batches) -> list[float]:
        """Take a step on each batch, reading each loss while the next step runs."""
        losses, before = [], None
        for batch in batches:
            issued = self.issue(batch)
            if before is not None:
                losses.append(self.read(before))
            before = issued
        return [*losses, self.read(before)]


def hyper(config):
    from tools.reference import plain_jax

    o = config.optimizer
    assert (o.name, o.schedule, config.model.norm_eps) == ("adamw", "cosine", plain_jax.EPS)
    return plain_jax.Hyper(config.train.steps, o.learning_rate, o.warmup_steps, o.final_fraction, o.weight_decay,
                           o.clip_norm, o.b1, o.b2, o.eps)


def shape_of(model):
    from tools.reference import plain_jax

    return plain_jax.Shape(model.num_layers, model.embed_dim, model.num_heads, model.max_seq_len, model.vocab_size)


def plain(config, params) -> Contender:
    import jax

    from tools.reference import plain_jax

    shape = shape_of(config.model)
    state, step = plain_jax.start(plain_jax.from_jaxtrain(params)), plain_jax.make_step(shape, hyper(config))

    def issue(batch):
        nonlocal state
        state, loss = step(state, batch)
        return loss

    def evaluate(batches):
        pairs = [(float(plain_jax.loss(state[0], batch, shape)), batch["weights"].sum()) for batch in batches]
        return sum(loss * weight for loss, weight in pairs) / sum(weight for _, weight in pairs)

    return Contender(issue, float, jax.device_put, evaluate)


def torch_twin(config, params, compiled: bool = False) -> Contender:
    import torch

    from tools.reference import torch_twin

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = torch_twin.Twin(*shape_of(config.model))
    model.load_state_dict(torch_twin.from_jaxtrain(params))

    @torch.no_grad()
    def evaluate(batches):
        sums = [model(**torch_twin.tensors(batch)) for batch in batches]
        return float(sum(total for total, _ in sums) / sum(weight for _, weight in sums))

    return Contender(torch_twin.make_step(model, hyper(config), compiled), float, torch_twin.tensors, evaluate)


def bare_step(config, params) -> Contender:
    """jaxtrain's own compiled step without its loop: tells which of the two a difference comes from."""
    from jaxtrain.build import build

    run = build(config)
    state = run.init()  # the parameters are these

    def issue(batch):
        nonlocal state
        state, metrics = run.compiled_step(state, batch)
        return metrics["loss"]

    def evaluate(batches):
        return run.evaluate(state, len(batches))["eval_loss"]

    return Contender(issue, float, run.place, evaluate)


def contenders(names: list[str], config, params) -> dict[str, Contender]:
    makers = {"its step alone": bare_step, "plain": plain, "torch": torch_twin,
              "torch.compile": partial(torch_twin, compiled=True)}
    return {name: makers[name](config, params) for name in names}


# ------------------------------------------------------------------------------------------------------------- compare
def compare(names: list[str], shape: str, steps: int, unroll: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) milliseconds a step of every block, for jaxtrain and the others."""
    import jax

    from jaxtrain.build import build
    from jaxtrain.data import prefetch

    loop = importlib.import_module("jaxtrain.train")
    size = max(1, steps // 20)
    ends = range(WARM_UP, WARM_UP + steps + 1, size)  # where jaxtrain's loop pauses
    config = make_config(shape, ends[-1] + 1, unroll)  # a last step, so that no pause meets the final checkpoint
    run = build(config)
    others = contenders(names, config, run.init().params)
    held = {name: [other.place(run.train_batches[n]) for n in range(min(32, ends[-1]))]
            for name, other in others.items()}
    times = {name: [] for name in ("jaxtrain", *names)}
    written = threading.Event()

    def others_turn(end: int, count: int) -> None:
        with jax.transfer_guard("allow"):  # the loop forbids what it does not mean to do; the others may
            for name, other in others.items():
                batches = [held[name][n % len(held[name])] for n in range(end - count, end)]
                time.sleep(PAUSE)
                start = now()
                other.steps(batches)
                if end > WARM_UP:
                    times[name].append(since(start, count))
            time.sleep(PAUSE)

    class Written:  # a sink: tells when a step is complete and its line in the file
        def write(self, record):
            if record["step"] in ends:
                written.set()

        def close(self):
            pass

    class Pausing(prefetch):
        done = 0

        def __next__(self):
            if self.done in ends:
                written.wait()
                written.clear()
                if self.done > WARM_UP:
                    times["jaxtrain"].append(since(self.started, size))
                others_turn(self.done, size if self.done > WARM_UP else WARM_UP)
                self.started = now()
            self.done += 1
            return super().__next__()

    sinks = loop.sinks
    with (tempfile.TemporaryDirectory() as workdir, mock.patch.object(loop, "prefetch", Pausing),
          mock.patch.object(loop, "sinks", lambda *given: [*sinks(*given), Written()])):
        loop.train(config, workdir)
    return times


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float], steps: int) -> tuple[float, float]:
    """Milliseconds a step of (wall, CPU)."""
    return tuple(1000 * (b - a) / steps for a, b in zip(start, now(), strict=True))


def print_comparison(times: dict[str, list[tuple[float, float]]], title: str) -> None:
    print(f"\n{title}, {len(times['jaxtrain'])} blocks each")
    print(f"{'':16}{'ms/step':>9}{'CPU ms':>9}   jaxtrain / it: {'medians':>9}{'blocks':>9}{'CPU medians':>13}"
          f"{'CPU blocks':>12}")
    ours = times["jaxtrain"]
    for name, blocks in times.items():
        wall, cpu = (statistics.median(block[i] for block in blocks) for i in (0, 1))
        row = f"{name:16}{wall:9.2f}{cpu:9.2f}"
        if name != "jaxtrain":
            ratios = []
            for i in (0, 1):
                ratios += [statistics.median(b[i] for b in ours) / statistics.median(b[i] for b in blocks),
                           statistics.median(a[i] / b[i] for a, b in zip(ours, blocks, strict=True))]
            row += " " * 18 + "{:9.3f}{:9.3f}{:13.3f}{:12.3f}".format(*ratios)
        print(row, flush=True)


# -------------------------------------------------------------------------------------------------------------- losses
def losses(run, names: list[str], steps: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Training losses of every step, and the evaluation loss at the end, from the same weights on the same batches."""
    state, batches = run.init(), [run.train_batches[n] for n in range(steps)]
    others = contenders(names, run.config, state.params)
    curves = {"jaxtrain": []}
    for batch in batches:
        state, metrics = run.step(state, batch)
        curves["jaxtrain"].append(float(metrics["loss"]))
    curves |= {name: other.steps(map(other.place, batches)) for name, other in others.items()}
    held = [run.eval_batches[n] for n in range(min(8, run.eval_batches.num_batches))]
    final = {name: other.evaluate(held) for name, other in others.items()}
    return curves, {"jaxtrain": run.evaluate(state, len(held))["eval_loss"], **final}


def print_losses(names: list[str], shape: str, steps: int) -> None:
    from jaxtrain.build import build

    curves, final = losses(build(make_config(shape, steps)), names, steps)
    print(f"\n{shape}, {steps} steps from the same weights on the same batches")
    print(f"{'':16}{'first loss':>12}{'last loss':>12}{'eval loss':>12}   max |loss - jaxtrain's|")
    for name, curve in curves.items():
        apart = max(abs(a - b) for a, b in zip(curve, curves["jaxtrain"], strict=True))
        print(f"{name:16}{curve[0]:12.6f}{curve[-1]:12.6f}{final[name]:12.6f}   {apart:.1e}", flush=True)


# ---------------------------------------------------------------------------------------------------------- first step
def first_step(which: str, cache: str) -> float:
    """Seconds from the start of a process to the end of its first step."""
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
           "PYTHONPATH": str(ROOT)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as workdir, contextlib.ExitStack() as stack:
        start = time.perf_counter()
        if which == "plain":
            command = [sys.executable, ROOT / "tools/reference/plain_jax.py", *map(str, SHAPES["default"][:5])]
            process = stack.enter_context(subprocess.Popen(command, env=env, stdout=subprocess.PIPE))
            line = process.stdout.readline()  # the loss
        else:
            command = [sys.executable, "-m", "jaxtrain.main", f"--config={ROOT}/configs/gpt.py", f"--workdir={workdir}"]
            process = stack.enter_context(subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL))
            metrics, line = Path(workdir, "metrics.jsonl"), b""
            while process.poll() is None and not line:
                time.sleep(0.005)
                line = metrics.read_bytes() if metrics.exists() else b""
        seconds = time.perf_counter() - start
        process.kill()
        process.wait()
    if not line:
        raise SystemExit(f"{command} ended without a step")
    return seconds


def print_first_step(times: int = 5) -> None:
    names = ("jaxtrain", "plain")
    first_step("jaxtrain", tempfile.mkdtemp())  # tokenises the text, if this machine has not yet
    print(f"\nfirst step of configs/gpt.py, seconds from the start of the process, median of {times}")
    for kind in ("cold", "warm"):
        with contextlib.ExitStack() as stack:
            def fresh(stack=stack):
                return stack.enter_context(tempfile.TemporaryDirectory())

            kept = {name: fresh() for name in names}
            if kind == "warm":
                for name in names:
                    first_step(name, kept[name])
            seconds = {name: [] for name in names}
            for _ in range(times):
                for name in names:
                    seconds[name].append(first_step(name, kept[name] if kind == "warm" else fresh()))
        ours, theirs = (statistics.median(seconds[name]) for name in names)
        paired = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
        print(f"{kind} compilation cache: jaxtrain {ours:.2f}  plain {theirs:.2f}  ratio of medians "
              f"{ours / theirs:.2f}, of pairs {paired:.2f}; all "
              f"{[[round(s, 2) for s in seconds[name]] for name in names]}", flush=True)


# --------------------------------------------------------------------------------------------------------- import time
def print_import_time(times: int = 5) -> None:
    run = "import jaxtrain.main, jaxtrain.cache, jaxtrain.distributed, jaxtrain.train, ml_collections, grain"
    codes = {
        "python alone": "", "import jax": "import jax", "import jaxtrain": "import jaxtrain",
        "all that a run imports before its first step": run}
    print(f"\nCPU seconds, median of {times}")
    for name, code in codes.items():
        seconds = []
        for _ in range(times + 1):  # the first one may have to write bytecode
            env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPATH": str(ROOT)}
            process = subprocess.Popen([sys.executable, "-c", code], env=env)
            _, status, used = os.wait4(process.pid, 0)
            if status:
                raise SystemExit(f"{code} failed")
            seconds.append(used.ru_utime + used.ru_stime)
        print(f"{name:46}{statistics.median(seconds[1:]):6.2f}", flush=True)


# --------------------------------------------------------------------------------------------------------------- which
def header() -> str:
    """Machine, versions, commit, command: what a figure is worth nothing without."""
    def has(package):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            return None
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(": ")[2] for line in lines if "model name" in line), platform.processor())
    git = ["git", "--no-optional-locks", "describe", "--always", "--match=", "--dirty"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    packages = [told for package in ("jax", "jaxlib", "flax", "torch") if (told := has(package))]
    return (f"{name}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; "
            f"Python {platform.python_version()}, {', '.join(packages)}; commit {commit}\n"
            f"python {' '.join([os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", choices=("plain", "torch"))
    parser.add_argument("--shape", choices=SHAPES, default="g1")
    parser.add_argument("--steps", type=int, help="timed steps of each, in about 20 blocks")
    parser.add_argument("--unroll", default="0,1", help="train.unroll of jaxtrain's side")
    for flag in ("first_step", "import_time", "losses"):
        parser.add_argument(f"--{flag}", action="store_true")
    asked = parser.parse_args()
    print(header())
    if asked.compare:
        names = ["its step alone", "plain"] if asked.compare == "plain" else ["torch", "torch.compile"]
        for unroll in map(int, asked.unroll.split(",")):
            times = compare(names, asked.shape, asked.steps or SHAPES[asked.shape][-1], unroll)
            print_comparison(times, f"{asked.shape}, train.unroll={unroll}")
    if asked.losses:
        has_torch = importlib.util.find_spec("torch") is not None
        print_losses(["plain", *["torch"] * has_torch], asked.shape, asked.steps or 200)
    if asked.first_step:
        print_first_step()
    if asked.import_time:
        print_import_time()
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

"""Loss against wall time of islands that are processes, over links of a given rate and delay, in network namespaces.

    python tools/benchmarks/bench_diloco_network.py --steps=100
    python tools/benchmarks/bench_diloco_network.py --modes synchronous diloco --networks 100mbit

Needs Linux, root, and the commands ip and tc. Each island and the coordinator has a namespace of its own and a link to
a bridge; `tc` gives each end of a link its rate (a token bucket: tbf). Delay is netem's where the kernel has it;
elsewhere a relay beside each island holds every byte back for so long, each way, as the first line says.

Islands train a small GPT in processes of their own, on CPUs that are shared and slow. So that the table is one of
networks, each inner step is made to last `--step_s`: an accelerator's time for a step. The clock runs from the common
start, after compilation, to the end of the last exchange, without evaluations. The loss is that of the island that was
done last; of gossip no island has the parameters of another one. A lost round is one in which an island's link is down
until the round is closed without it. "Planned" is what `jaxtrain plan --link` says of as many such steps, with nothing
lost and no time for TLS, hashes and the outer optimizer.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
NETWORKS = {"1gbit": ("1gbit", 0.0), "100mbit": ("100mbit", 0.0), "10mbit": ("10mbit", 0.0),
            "100mbit, lost": ("100mbit", 0.01)}  # the rate, and the share of rounds in which an island is cut off
TIMEOUT_S = 3.0  # of a round, with links that go down


def modes(every):
    """The diloco.* keys of each mode; synchronous islands average their parameters after every step."""
    return {"synchronous": dict(every=1, learning_rate=1.0, momentum=0.0), "diloco": dict(every=every),
            "streaming": dict(every=every, fragments=2, overlap=max(1, every // 4)),
            "asynchronous": dict(every=every, mode="async"), "gossip": dict(every=every, mode="gossip")}


# ---------------------------------------------------------------------------------------------------------- an island
def island(settings):
    """Train as an island; a line on stdin is the start. Prints when it is ready, and at the end what it measured."""
    import jax

    import jaxtrain as jt
    from jaxtrain.config.load import load_config
    from jaxtrain.diloco.joining import Joining
    from jaxtrain.extensions import of_kind
    from jaxtrain.run import for_run

    if settings["relay"]:
        settings["keys"]["meeting"] = f"tcp://127.0.0.1:{relay(settings['coordinator'], settings['delay_s'])}"
    run = jt.build(load_config(str(ROOT / "configs" / "gpt.py:tiny"), {
        key: str(value) for key, value in (settings["run"] | {
            f"islands.{key}": value for key, value in settings["keys"].items()}).items()}), devices=jax.devices()[:1])
    run = for_run(run, ROOT)
    exchange = of_kind(run, Joining).exchange
    steps, curve, evaluating = run.config.train.steps, [], 0.0
    jax.block_until_ready(run.step(run.init(), run.batch(0)))  # compiles
    run.evaluate(run.init(), 8)
    print("ready", flush=True)
    sys.stdin.readline()
    began, waited, sent, received, busy = time.perf_counter(), 0.0, 0.0, 0.0, 0.0
    state = exchange.begin(0, run.init())
    for step in range(steps):
        at = time.perf_counter()
        state, _ = run.step(state, run.batch(step))
        jax.block_until_ready(state.params)
        busy += time.perf_counter() - at
        time.sleep(max(0.0, settings["step_s"] - (time.perf_counter() - at)))
        if exchange.due(step + 1, step + 1 == steps):
            state = exchange.after(step + 1, state, step + 1 == steps)
            fields = exchange.pop_fields()
            waited += fields.get("island_wait_s", 0)
            sent += fields.get("island_sent_bytes", 0)
            received += fields.get("island_received_bytes", 0)
        if (step + 1) % (steps // 4) == 0:
            at = time.perf_counter()
            curve.append((round(at - began - evaluating, 2), run.evaluate(state, 32)["eval_loss"]))
            evaluating += time.perf_counter() - at
    tokens = run.batch_source.tokens(steps)
    print(json.dumps({"curve": curve, "wait_s": waited, "sent": sent, "received": received, "tokens": tokens,
                      "step_s": busy / steps, "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params))}),
          flush=True)


def relay(coordinator, delay_s):
    """Listen on loopback, and carry every byte to the coordinator and back so many seconds later; returns the port."""
    host, _, port = coordinator.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def carry(source, target):
        held, here = [], threading.Condition()

        def deliver():
            while True:
                with here:
                    here.wait_for(lambda: held)
                    due, content = held.pop(0)
                time.sleep(max(0.0, due - time.monotonic()))
                with contextlib.suppress(OSError):
                    if not content:
                        return target.shutdown(socket.SHUT_WR)
                    target.sendall(content)

        threading.Thread(target=deliver, daemon=True).start()
        content = b"."
        while content:
            try:
                content = source.recv(2**18)
            except OSError:
                content = b""
            with here:
                held.append((time.monotonic() + delay_s, content))
                here.notify()

    def accept():
        while True:
            line = listener.accept()[0]
            try:
                other = socket.create_connection((host, int(port)), 5)
                other.settimeout(None)
            except OSError:
                line.close()
                continue
            for way in ((line, other), (other, line)):
                threading.Thread(target=carry, args=way, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener.getsockname()[1]


# -------------------------------------------------------------------------------------------------------- the network
def run(*words):
    """Run a command of iproute2."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}")


class Network:
    """Namespaces around a bridge, which has one of its own; names begin with this process's number."""

    def __init__(self, count, rate, delay_ms):
        self.names, self.mark = ["c", *map(str, range(count))], f"jt{os.getpid()}"
        self.delay_ms = delay_ms
        self.has_netem = False
        try:
            run("ip", "netns", "add", f"{self.mark}b")
            self.inside("b", "ip", "link", "add", "lan", "type", "bridge")
            self.inside("b", "ip", "link", "set", "lan", "up")
            for number, name in enumerate(self.names):
                self.join(name, f"10.77.0.{number + 1}/24", rate)
        except BaseException:
            self.close()
            raise

    def inside(self, name, *words):
        run("ip", "netns", "exec", f"{self.mark}{name}", *words)

    def join(self, name, address, rate):
        run("ip", "netns", "add", f"{self.mark}{name}")
        run("ip", "-n", f"{self.mark}b", "link", "add", f"to{name}", "type", "veth", "peer", "name", "lan0", "netns",
            f"{self.mark}{name}")
        self.inside("b", "ip", "link", "set", f"to{name}", "master", "lan", "up")
        for words in (("link", "set", "lo", "up"), ("address", "add", address, "dev", "lan0"),
                      ("link", "set", "lan0", "up")):
            self.inside(name, "ip", *words)
        for where, device in (("b", f"to{name}"), (name, "lan0")):
            self.inside(where, "tc", "qdisc", "add", "dev", device, "root", "handle", "1:", "tbf", "rate", rate,
                        "burst", "256kb", "latency", "100ms")
            with contextlib.suppress(SystemExit):
                if self.delay_ms:
                    self.inside(where, "tc", "qdisc", "add", "dev", device, "parent", "1:1", "netem", "delay",
                                f"{self.delay_ms / 2}ms", "limit", "100000")
                    self.has_netem = True

    def start(self, name, words, **keys):
        return subprocess.Popen(["ip", "netns", "exec", f"{self.mark}{name}", *words], cwd=ROOT, text=True,
                                env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}, **keys)

    def link(self, name, state):
        self.inside("b", "ip", "link", "set", f"to{name}", state)

    def close(self):
        for name in ("b", *self.names):
            subprocess.run(["ip", "netns", "del", f"{self.mark}{name}"], capture_output=True)


def lose_rounds(network, journal, rounds, count, rng, done):
    """Take an island's link down while these rounds are decided."""
    for number in rounds:
        while not done.wait(0.05) and positions(journal) < number:
            pass
        victim = rng.randrange(count)
        network.link(str(victim), "down")
        until = time.monotonic() + 60
        while not done.wait(0.05) and positions(journal) <= number and time.monotonic() < until:
            pass
        network.link(str(victim), "up")


def positions(journal):
    """Return how many entries a log has, of which its journal may have the newest ones only."""
    with contextlib.suppress(FileNotFoundError):
        return max(map(int, re.findall(rb'{"entry":{"number":(\d+),', journal.read_bytes())), default=0)
    return 0


def measured(args, mode, network_name):
    """Train once; returns what the islands measured, and what became of the log."""
    from jaxtrain.diloco.network import certificates

    rate, lost = NETWORKS[network_name]
    keys, folder = modes(args.every)[mode], Path(tempfile.mkdtemp(prefix="jaxtrain-islands-"))
    certificates.make(folder / "keys", range(args.islands))
    network, processes, done = Network(args.islands, rate, args.delay_ms), [], threading.Event()
    try:
        processes.append(network.start("c", [
            sys.executable, "-m", "jaxtrain", "islands", "serve", f"--workdir={folder / 'log'}",
            "--address=10.77.0.1:7000", f"--keys={folder / 'keys'}", f"--islands={args.islands}",
            f"--mode={'async' if keys.get('mode') == 'async' else 'sync'}",
            f"--timeout={TIMEOUT_S if lost else 600}", "--oldest=16"], stderr=subprocess.DEVNULL))
        for index in range(args.islands):
            settings = {"coordinator": "10.77.0.1:7000", "delay_s": args.delay_ms / 2000, "step_s": args.step_s,
                        "relay": bool(args.delay_ms) and not network.has_netem, "keys": keys | {
                            "count": args.islands, "index": index, "meeting": "tcp://10.77.0.1:7000",
                            "keys": str(folder / "keys")},
                        "run": {"train.steps": args.steps, "train.eval_every": 0, "model.embed_dim": args.embed_dim,
                                "optimizer.warmup_steps": args.steps // 20, "data.global_batch_size": args.rows}}
            processes.append(network.start(str(index), [sys.executable, __file__, "--island", json.dumps(settings)],
                                           stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=args.log))
        for process in processes[1:]:
            assert process.stdout.readline() == "ready\n", "an island did not start; see --log"
        rounds = args.steps // (keys["every"] // keys.get("fragments", 1)) * (args.islands if mode[0] == "a" else 1)
        rng = random.Random(args.seed)
        chosen = sorted(rng.sample(range(1, rounds - 1), max(1, round(lost * rounds)))) if lost else []
        loser = threading.Thread(target=lose_rounds, args=(network, folder / "log" / "journal.jsonl", chosen,
                                                           args.islands, rng, done))
        for process in processes[1:]:
            process.stdin.write("go\n")
            process.stdin.flush()
        loser.start()
        results = [json.loads(process.stdout.readline()) for process in processes[1:]]
        done.set()
        loser.join()
        return {"mode": mode, "network": network_name, "islands": results, "lost": len(chosen),
                "netem": network.has_netem, "entries": positions(folder / "log" / "journal.jsonl")}
    finally:
        done.set()
        for process in processes:
            process.kill()
            process.wait()
        network.close()


def planned(args, mode, rate, parameters):
    """Return how long the plan's closed form says that the steps of a mode take, at the port of a coordinator."""
    from jaxtrain.config.sections.diloco_keys import DilocoConfig
    from jaxtrain.plan.cost import island_time

    link = float(rate.removesuffix("mbit")) * 1e6 / 8 if rate.endswith("mbit") else float(rate[0]) * 1e9 / 8
    name = "DiLoCo" if mode in ("synchronous", "diloco") else mode  # here all of them meet at the coordinator
    found = island_time.modes(DilocoConfig(count=args.islands, **modes(args.every)[mode]), args.step_s, parameters,
                              link, port=link, latency=args.delay_ms / 1000)
    return args.steps * next(one.seconds for one in found if one.name == name)


def main():
    """Parse the flags, and print a line for each mode and network."""
    if sys.argv[1:2] == ["--island"]:
        return island(json.loads(sys.argv[2]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # namespaces are taken down
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="of each island")
    parser.add_argument("--every", type=int, default=10, help="inner steps between exchanges")
    parser.add_argument("--islands", type=int, default=2, help="how many there are")
    parser.add_argument("--rows", type=int, default=8, help="of an island's batch")
    parser.add_argument("--embed_dim", type=int, default=192, help="the width of the model")
    parser.add_argument("--step_s", type=float, default=0.5, help="how long a step is made to last")
    parser.add_argument("--delay_ms", type=float, default=40.0, help="of a round trip")
    parser.add_argument("--modes", nargs="+", choices=modes(10), default=list(modes(10)), help="some of them")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="some of them")
    parser.add_argument("--seed", type=int, default=0, help="of which islands are cut off, and when")
    parser.add_argument("--log", type=argparse.FileType("a"), default=subprocess.DEVNULL, help="errors of islands")
    args = parser.parse_args()
    print("| network | mode | wall time, s | planned, s | waited, s | loss | loss at 1/4, 1/2, 3/4 | MB sent, received "
          "| lost |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for network_name in args.networks:
        for mode in args.modes:
            found = measured(args, mode, network_name)
            last = max(found["islands"], key=lambda one: one["curve"][-1][0])  # it has the end of the log
            wall = last["curve"][-1][0]
            quarters = ", ".join(f"{loss:.3f} ({at:.0f} s)" for at, loss in last["curve"][:-1])
            plan = planned(args, mode, NETWORKS[network_name][0], last["parameters"])
            print(f"| {network_name} | {mode} | {wall:.1f} | {plan:.1f} | {last['wait_s']:.1f} | "
                  f"{last['curve'][-1][1]:.4f} | {quarters} | {last['sent'] / 1e6:.1f}, {last['received'] / 1e6:.1f} | "
                  f"{found['lost']} |", flush=True)
            print(json.dumps(found), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

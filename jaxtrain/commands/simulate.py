"""Predict goodput under failures, and choose save intervals, tiers and spare machines.

    jaxtrain simulate --devices 8 512 16384
    jaxtrain simulate --devices 4096 --measured=WORKDIR --spares 0 2 8
    jaxtrain simulate --replay=WORKDIR
    jaxtrain simulate --case=byterobust

Runs the decisions of the supervisor, the watchdog and the savers on a virtual clock, against failures drawn from
published rates, and reads the ledgers of these runs as jaxtrain goodput does. All figures are predictions: the rates
are from other clusters, and the durations are assumed unless --measured takes them from a run of your own.
"""

import argparse
import dataclasses
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.commands.flags import Parser, add_json, command, parser_of, tell_json
from jaxtrain.errors import UserError, nearest, tell

if TYPE_CHECKING:
    from jaxtrain.simulation.failure_trace import Failure
    from jaxtrain.simulation.predictions import Prediction
    from jaxtrain.simulation.reported_rates import Rates
    from jaxtrain.simulation.run_durations import Durations
    from jaxtrain.simulation.virtual_run import Setup

_SECONDS = {  # flag: (field of Durations, what it is)
    "step_time": ("step", "seconds of a step"),
    "start_time": ("launch", "seconds from the decision to start to the first step"),
    "save_blocked": ("save_blocked", "seconds for which a save blocks the loop"),
    "save_written": ("save_written", "seconds after which a save is on disk"),
    "snapshot_blocked": ("snapshot_blocked", "seconds for which a snapshot in memory blocks the loop"),
    "snapshot_stored": ("snapshot_stored", "seconds after which a snapshot is with the peer"),
    "swap_time": ("swap", "seconds until a spare machine takes the place of a lost one"),
    "repair_time": ("repair", "mean seconds until a lost machine without a spare is back"),
    "person_time": ("person", "seconds until somebody starts a run again that the supervisor gave up"),
}


def parser() -> Parser:
    """Return the parser of the command line."""
    made = parser_of("simulate", __doc__)
    made.add_argument("--devices", type=int, nargs="+", help="numbers of devices; default: 8 64 512 4096 16384")
    made.add_argument("--devices_per_node", type=int, default=8, help="devices of a machine; default: 8")
    made.add_argument("--rates", default="llama3", metavar="NAME_OR_NUMBER",
                      help="how often machines fail: llama3 (3.79 failures in a thousand days of a machine), rsc1 "
                           "(6.50), rsc2 (2.34), byterobust (1.42), a number, or own: those of the run that --measured "
                           "names; default: llama3")
    made.add_argument("--shape", type=float, default=1.0,
                      help="shape of the Weibull distribution of the times between failures of a machine; below 1 they "
                           "come in clusters; default: 1, exponential")
    made.add_argument("--days", type=int, default=30, help="days that a run lasts; default: 30")
    made.add_argument("--runs", type=int, default=20, help="simulated runs of each choice; default: 20")
    made.add_argument("--seed", type=int, default=0, help="seed of the failures; default: 0")
    made.add_argument("--spares", type=int, nargs="+", help="numbers of spare machines; default: 0 1 2 4 8")
    made.add_argument("--elastic", action="store_true",
                      help="continue on fewer machines, whose number divides that of all, where one is missing")
    made.add_argument("--measured", metavar="WORKDIR",
                      help="take the durations from the ledger and events of a run under jaxtrain supervise")
    made.add_argument("--replay", metavar="WORKDIR",
                      help="simulate a run with the failures that it had, and compare the two ledgers; with "
                           "--measured, with the durations of another run")
    made.add_argument("--case", help="predict a published run from what its report gives: llama3 or byterobust")
    made.add_argument("--output", metavar="FOLDER",
                      help="write the ledger and events of one simulated run, of the best choice for the last number "
                           "of devices, as a workdir that jaxtrain goodput reads")
    add_json(made, "print one JSON object per choice")
    for flag, (name, what) in _SECONDS.items():
        default = 65.0 if flag == "start_time" else _default(name)
        made.add_argument(f"--{flag}", type=float, help=f"{what}; default: {default:g}")
    made.group("failures", "rates", "shape", "days", "runs", "seed")
    made.group("durations", "measured", *_SECONDS)
    made.group("checks of the simulation", "replay", "case")
    return made


def _default(name: str) -> float:
    """Return the default of a duration, without importing what a simulation needs."""
    return {"step": 10.0, "save_blocked": 1.0, "save_written": 60.0, "snapshot_blocked": 0.2, "snapshot_stored": 5.0,
            "swap": 60.0, "repair": 7200.0, "person": 1800.0}[name]


@command()
def main(argv: list[str] | None = None) -> None:
    """Print predictions."""
    flags = parser().parse_args(argv)
    _check(flags)
    from jaxtrain.simulation import prediction_table, published_runs  # imports JAX, for which --help does not wait
    from jaxtrain.simulation.replay import replay
    from jaxtrain.simulation.run_durations import each_measured

    if flags.replay:
        own = [] if flags.measured else each_measured(flags.replay)
        found = replay(flags.replay, own or [_durations(flags, flags.measured)])
        tell(prediction_table.replay_text(found))
        return
    if flags.case:
        case = published_runs.CASES[flags.case]()
        tell(prediction_table.case_text(case, case.predictions(flags.runs, flags.seed)))
        return
    _predict(flags)


def _check(flags: argparse.Namespace) -> None:
    """Refuse what makes no sense, before anything is imported."""
    for flag, least, fix in (("devices_per_node", 1, "give 1 or more"), ("runs", 1, "give 1 or more")):
        if getattr(flags, flag) < least:
            raise UserError(f"--{flag}", f"{getattr(flags, flag)} is too few", fix)
    if flags.seed < 0:
        raise UserError("--seed", f"{flags.seed} is negative", "give 0 or more")
    if not 0 < flags.days < math.inf:
        raise UserError("--days", f"{flags.days} is not a positive number", "give one")
    if not 0.1 <= flags.shape < math.inf:  # below, the scale of a Weibull distribution overflows
        raise UserError("--shape", f"{flags.shape} is not a number of 0.1 or more", "give one")
    for flag in _SECONDS:
        value = getattr(flags, flag)
        if value is not None and not (0 < value < math.inf if flag == "step_time" else 0 <= value < math.inf):
            raise UserError(f"--{flag}", f"{value} is not a number of seconds", "give a positive number")
    for number in flags.devices or ():
        if number < 1:
            raise UserError("--devices", f"{number} is not a number of devices", "give 1 or more")
    for number in flags.spares or ():
        if number < 0:
            raise UserError("--spares", f"{number} is negative", "give 0 or more")
    if flags.case and flags.case not in ("llama3", "byterobust"):
        raise UserError("--case", f"there is no case {flags.case!r}", nearest(flags.case, ("llama3", "byterobust")))
    if flags.output and Path(flags.output, "ledger").exists():
        raise UserError("--output", f"{flags.output} has a ledger already", "give a new folder")
    if flags.output and (flags.case or flags.replay):
        raise UserError("--output", "only predictions can be written as a workdir", "leave out --case and --replay")
    if flags.json and (flags.case or flags.replay):
        raise UserError("--json", "only predictions are printed as objects", "leave out --case and --replay")
    if flags.output:
        try:
            Path(flags.output).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError("--output", f"{flags.output}: {error.strerror}", "give a folder that can be made") from None


def _durations(flags: argparse.Namespace, workdir: str | None) -> "Durations":
    """Return the durations: those of a run, or assumed ones, with what flags say."""
    from jaxtrain.simulation.run_durations import Durations, measured

    base = measured(workdir) if workdir else Durations()
    changes = {name: value for flag, (name, _) in _SECONDS.items() if (value := getattr(flags, flag)) is not None}
    if flags.start_time is not None:  # the parts keep their proportions
        factor = flags.start_time / (base.start or 1.0)
        changes |= {name: getattr(base, name) * factor for name in ("launch", "init", "restore", "compile")}
    return dataclasses.replace(base, **changes)


def _rates(flags: argparse.Namespace) -> "Rates":
    """Return the rates that a flag names or gives."""
    from jaxtrain.simulation.failure_trace import observed
    from jaxtrain.simulation.reported_rates import LLAMA3, RATES, Rates

    if flags.rates == "own":
        if not flags.measured:
            raise UserError("--rates", "own are the rates of a run, and none is given", "add --measured=WORKDIR")
        per_day, count = observed(flags.measured)
        return Rates(per_day, f"the {count} failures of {flags.measured}, by machine")
    if flags.rates in RATES:
        return RATES[flags.rates]
    try:
        number = float(flags.rates)
    except ValueError:
        raise UserError("--rates", f"there are no rates {flags.rates!r}", nearest(flags.rates, RATES)) from None
    if not 0 < number < math.inf:
        raise UserError("--rates", f"{flags.rates} is not a positive number of failures", "give one, or a name")
    return LLAMA3.scaled(number, f"{number:g} failures in a thousand days of a machine (--rates); kinds as in Llama "
                         "3's report")


def _predict(flags: argparse.Namespace) -> None:
    """Print the table, a sentence for each number of devices, and the assumptions."""
    from jaxtrain.simulation import prediction_table
    from jaxtrain.simulation.failure_trace import DAY
    from jaxtrain.simulation.predictions import advise, traces
    from jaxtrain.simulation.virtual_run import Setup

    durations, rates = _durations(flags, flags.measured), _rates(flags)
    spares = sorted({0, *(flags.spares or (0, 1, 2, 4, 8))})
    rows, sentences, last = [], [], None
    for devices in flags.devices or (8, 64, 512, 4096, 16384):
        slots = -(-devices // flags.devices_per_node)
        setup = Setup(slots, durations, until=flags.days * DAY)
        if flags.elastic:
            setup = dataclasses.replace(setup, least=max(1, slots // 2), fits=lambda count, all=slots: all % count == 0)
        advice = advise(setup, rates.per_day, spares, flags.runs, flags.seed, flags.shape)
        rows += prediction_table.lines(devices, advice)
        sentences.append(prediction_table.sentence(devices, advice))
        last = advice.best.setup
        if flags.json:
            tell_json(*(_json(devices, advice.mtbf, one) for one in [*advice.tiers, *advice.spares[1:]]))
    if not flags.json:
        tell("predicted, not measured:\n" + prediction_table.grid(prediction_table.HEAD, rows))
        tell("\n".join(sentences))
        tell(f"assumed: {rates.source}; durations of {flags.measured or 'no run'}: {_told(durations)}; "
             f"{flags.runs} runs of {flags.days:g} days")
    if flags.output and last is not None:
        _write(Path(flags.output), last, traces(rates.per_day, last, 1, flags.seed, flags.shape)[0], flags.seed)


def _told(d: "Durations") -> str:
    """Return the durations that matter, in words."""
    return (f"steps of {d.step:.3g} s, starts of {d.start:.0f} s, saves that block for {d.save_blocked:.2g} s and are "
            f"on disk after {d.save_written:.2g} s, snapshots that block for {d.snapshot_blocked:.2g} s and are stored "
            f"after {d.snapshot_stored:.2g} s, a lost machine without a spare that is back after {d.repair:.0f} s on "
            "average")


def _write(folder: Path, setup: "Setup", failures: "list[Failure]", seed: int) -> None:
    """Write the ledger and events of a run that makes as many steps as one with these failures does in its time."""
    from jaxtrain.simulation.virtual_run import VirtualRun

    folder.mkdir(parents=True, exist_ok=True)
    whole = VirtualRun(setup, failures, seed).run()
    steps = dataclasses.replace(setup, last_step=whole.account.step, until=math.inf)
    VirtualRun(steps, failures, seed, folder, time.time() - whole.seconds).run()


def _json(devices: int, mtbf: float, one: "Prediction") -> dict[str, object]:
    """Return one choice as a JSON object."""
    checkpoint = one.setup.checkpoint
    return {"predicted": True, "devices": devices, "machines": one.setup.slots, "spares": one.setup.spares,
            "seconds_between_failures": mtbf, "checkpoint_every": checkpoint.every,
            "local_checkpoint_every": checkpoint.local_checkpoint_every, "ettr_low": one.low, "ettr": one.middle,
            "ettr_high": one.high, "failures": one.failures, "gave_up": one.gave_up, "shares": dict(one.shares)}

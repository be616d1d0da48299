"""The session of a run, from its first moment to its last: watchdog, ledger, signals and the lock on its workdir."""

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jaxtrain.config.schema import ResilienceConfig
from jaxtrain.distributed import exit_codes
from jaxtrain.distributed.run_lock import run_lock
from jaxtrain.observe import traces
from jaxtrain.observe.ledger import Ledger
from jaxtrain.observe.traces import Traces
from jaxtrain.observe.trackers.tracker import Tracker
from jaxtrain.resilience.watchdog import Watchdog
from jaxtrain.run import Run, name_of
from jaxtrain.trainer.capture import Capture
from jaxtrain.trainer.observers import Observer
from jaxtrain.trainer.out_of_memory import explained
from jaxtrain.trainer.shutdown import Interrupt

if TYPE_CHECKING:
    from jaxtrain.observe.prometheus.run_metrics import RunMetrics


class Interrupted(exit_codes.RunExit):
    """The run was asked to stop, saved its state unless that would be of no use, and can be resumed."""

    def __init__(self, step: int, number: int, saved: bool = True):
        self.step, self.signal = step, number
        super().__init__(exit_codes.INTERRUPTED if number == signal.SIGINT else exit_codes.SAVED,
                         f"{'saved' if saved else 'stopped'} at step {step}; run the same command again to resume")


STOPPED = (Interrupted, KeyboardInterrupt, SystemExit)  # how a run ends that was asked to


@dataclass(frozen=True)
class Session:
    """The workdir of a run and what watches over it; rollbacks do not end it."""

    workdir: Path
    watchdog: Watchdog
    ledger: Ledger
    interrupt: Interrupt
    observers: Sequence[Observer]
    trackers: Sequence[Tracker]  # the user's own
    traces: Traces
    may_change: Sequence[str] = ()  # keys of the config
    adopt: bool = False  # whether to go on from a checkpoint of another run
    exported: "RunMetrics | None" = None  # to Prometheus
    config_name: str = ""  # as run.json has it
    epochs: float = 0.0  # that the length of the run was given in; 0: it was given in steps
    require_proof: str | Path = ""  # the folder of certificates without which the run is refused; "": none is needed

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Account for work that is not a step under its name, and give it more time before it counts as hung."""
        with self.ledger.book(name), self.watchdog.phase(name), self.traces.span(name):
            yield

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Give checks and saves more time than a step; they enter their seconds in the ledger themselves."""
        with self.watchdog.phase("save"), self.traces.span("save"):
            yield

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Watch over the steps in this block."""
        with self.watchdog.training(), self.traces.training():
            yield

    def completed(self, step: int) -> None:
        """Note that the devices completed a step; on the metrics writer's thread."""
        self.watchdog.completed(step)
        if self.exported is not None:
            self.exported.completed(step)

    def pause(self, step: int, seconds: float) -> bool:
        """Wait, and return True; or return False, in all processes alike, as soon as the run is asked to stop."""
        with self.ledger.book("other"):
            while seconds > 0:
                if self.interrupt.requested(step):
                    return False
                time.sleep(min(seconds, 1))
                seconds -= 1
        return True


@contextlib.contextmanager
def session_of(run: Run, workdir: Path, watchdog: Watchdog, ledger: Ledger, observers: Sequence[Observer],
               trackers: Sequence[Tracker], may_change: Sequence[str], adopt: bool,
               config_name: str = "", epochs: float = 0.0, require_proof: str | Path = "") -> Iterator[Session]:
    """Yield the session of a run that has its workdir to itself, with what watches, traces and exports it."""
    mesh = {axis: size for axis, size in run.mesh.shape.items() if size > 1}
    with (
        run_lock(workdir),
        traces.opened(run.config.observe.traces, workdir, lambda: ledger.reached[0], ledger.began,
                      jax.process_index() == 0) as spans,
        spans.run(STOPPED, model=name_of(run), mesh=f"{mesh}", processes=jax.process_count(),
                  device=jax.devices()[0].device_kind),
        explained(run, workdir, watchdog.phase),
        Capture(run, workdir) as capture,
        exported(run, workdir, ledger) as metrics,
    ):
        yield Session(workdir, watchdog, ledger, Interrupt(), [*observers, capture], trackers, spans, may_change, adopt,
                      metrics, config_name, epochs, require_proof)


def exported(run: Run, workdir: str | Path, ledger: Ledger) -> contextlib.AbstractContextManager:
    """Return a context that exports the metrics of this process and yields them; or None, if that is not asked for."""
    if not run.config.observe.prometheus_port and not run.config.observe.prometheus_textfile:
        return contextlib.nullcontext()
    from jaxtrain.trainer import exported_metrics

    return exported_metrics.exported(run, workdir, ledger)


@contextlib.contextmanager
def watched(workdir: str | Path, limits: ResilienceConfig) -> Iterator[tuple[Watchdog, Ledger]]:
    """Start the watchdog, which ends a run that hangs, and the ledger, which accounts for every second."""
    with (
        Watchdog(workdir, limits) as watchdog,
        Ledger(workdir, stopped=STOPPED) as ledger,
    ):
        yield watchdog, ledger

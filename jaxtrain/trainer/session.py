"""What accompanies a run from its first moment to its last: watchdog, ledger, signals and the lock on its workdir."""

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.config.schema import ResilienceConfig
from jaxtrain.distributed import exit_codes
from jaxtrain.observe.ledger import Ledger
from jaxtrain.observe.trackers.tracker import Tracker
from jaxtrain.resilience.watchdog import Watchdog
from jaxtrain.trainer.observers import Observer
from jaxtrain.trainer.shutdown import Interrupt


class Interrupted(exit_codes.RunExit):
    """The run was asked to stop, saved its state, and can be resumed."""

    def __init__(self, step: int, number: int):
        self.step, self.signal = step, number
        super().__init__(exit_codes.INTERRUPTED if number == signal.SIGINT else exit_codes.SAVED,
                         f"saved at step {step}; run the same command again to resume")


@dataclass(frozen=True)
class Session:
    """The workdir of a run and what watches over it; rollbacks do not end it."""

    workdir: Path
    watchdog: Watchdog
    ledger: Ledger
    interrupt: Interrupt
    observers: Sequence[Observer]
    trackers: Sequence[Tracker] = ()  # the user's own
    may_change: Sequence[str] = ()  # keys of the config
    adopt: bool = False  # whether to go on from a checkpoint of another run

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Account for work that is not a step under its name, and give it more time before it counts as hung."""
        with self.ledger.book(name), self.watchdog.phase(name):
            yield

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
def watched(workdir: str | Path, limits: ResilienceConfig) -> Iterator[tuple[Watchdog, Ledger]]:
    """Start the watchdog, which ends a run that hangs, and the ledger, which accounts for every second."""
    with (
        Watchdog(workdir, limits) as watchdog,
        Ledger(workdir, stopped=(Interrupted, KeyboardInterrupt, SystemExit)) as ledger,
    ):
        yield watchdog, ledger

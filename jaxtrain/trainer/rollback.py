"""Handling of anomalous steps: report them, roll back to before them, or stop.

Whether a step is anomalous is read two steps late, when its numbers are available anyway, and every process reads the
same answer at the same step, so all decide alike without communication. A rollback works like a restart: the record of
batches to skip is written, the loop is left, and the next one starts from the newest valid checkpoint.
"""

import contextlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import jax

from jaxtrain.base.annotations import AnyArray, JsonMapping
from jaxtrain.checkpoint import CheckpointManager
from jaxtrain.checkpoint.manager import NotSaved
from jaxtrain.config.schema import ResilienceConfig
from jaxtrain.data.loading.skipped_batches import FILE, SkippedBatches
from jaxtrain.distributed import exit_codes
from jaxtrain.distributed.coordination import together
from jaxtrain.errors import UserError
from jaxtrain.observe import events

LAG = 2  # of MetricsWriter: when a step is pushed, the one this many before it is complete
_turns = itertools.count()  # processes settle equally often, so a number identifies an exchange


class RolledBack(Exception):
    """Raised to leave the loop and start again from a checkpoint."""


class GivenUp(exit_codes.RunExit):
    """Raised when anomalies exceeded a limit: a person must look, and a restart would not help."""


class AnomalyGuard:
    """Checks every step for anomalies; in a multi-process run every process makes all calls, at the same steps."""

    def __init__(self, workdir: str | Path, limits: ResilienceConfig, checkpoints: CheckpointManager,
                 passed: SkippedBatches, say: Callable[[str], None],
                 phase: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext):
        """`phase` is a context manager for what takes longer than a step."""
        self._phase = phase
        self._workdir, self._limits, self._checkpoints = Path(workdir), limits, checkpoints
        self._passed, self._say = passed, say
        self._unseen: deque[tuple[int, Mapping[str, AnyArray]]] = deque()

    def look(self, step: int, metrics: Mapping[str, AnyArray]) -> None:
        """Check the step two before `step`, which was just dispatched and pushed to the metrics.

        Raises:
            RolledBack: the batches to skip are on disk; start again.
            GivenUp: a limit is reached.
        """
        self._unseen.append((step, metrics))
        if len(self._unseen) > LAG:
            self._judge(*self._unseen.popleft())

    def look_at_all(self) -> None:
        """Check all steps so far, so that only checked steps are saved; waits for the device."""
        while self._unseen:
            self._judge(*self._unseen.popleft())

    def _judge(self, step: int, metrics: Mapping[str, AnyArray]) -> None:
        spike, in_a_row = jax.device_get((metrics["spike"], metrics["skipped_in_a_row"]))
        if not spike and not in_a_row:
            return
        limits, in_a_row = self._limits, int(in_a_row)
        told = {key: float(jax.device_get(metrics[key])) for key in ("loss", "grad_norm", "loss_z", "grad_norm_z")}
        what = _describe(step, told, bool(spike))
        self._record("skip" if in_a_row else "spike", step, batch=self._passed.batch(step - 1), in_a_row=in_a_row,
                     spike=bool(spike), **told)
        too_many = in_a_row >= limits.max_skips
        if limits.spikes == "rollback" and (spike or too_many):
            self._roll_back(step, max(in_a_row, 1) if too_many else 1, what)
        if too_many:
            self._give_up(step, f"{what}; {in_a_row} consecutive updates were skipped, which is resilience.max_skips",
                          **told)
        self._say(f"{what}; its update was " + ("skipped" if in_a_row else "applied, because resilience.spikes=record"))

    def _roll_back(self, step: int, offending: int, what: str) -> None:
        limits = self._limits
        if self._passed.rollbacks >= limits.max_rollbacks:
            self._give_up(step, f"{what}; the run was rolled back {self._passed.rollbacks} times before, which is "
                          "resilience.max_rollbacks")
        with self._phase("checkpoint"), contextlib.suppress(NotSaved):  # a failed save was reported, and does not exist
            self._checkpoints.wait()  # so that the set of checkpoints does not depend on timing
        if jax.process_index() == 0:
            last = step - 1  # the index of the last offending step
            first = max(0, step - offending - limits.skip_batches + 1)
            # Where all checkpoints are younger, skip fewer batches rather than lose all work.
            there = [saved for saved in self._checkpoints.steps() if saved <= last]
            if there and min(there) > first:
                first = min(there)
            passed = self._passed.after_rollback(first, last)
            batches = [self._passed.batch(first), self._passed.batch(last)]
            self._record("rollback", step, restores_at_most=first, batches=batches, rollbacks=passed.rollbacks)
            passed.write(self._workdir)
            self._say(f"{what}; going back to step {max((n for n in there if n <= first), default=0)} and skipping "
                      f"batches {batches[0]} to {batches[1]} (rollback {passed.rollbacks} of at most "
                      f"{limits.max_rollbacks})")
        raise RolledBack

    def _give_up(self, step: int, why: str, **fields: object) -> None:
        self._record("stop", step, why=why, **fields)
        raise GivenUp(exit_codes.STOPPED, f"{why}; look at the steps in {self._workdir}/events.jsonl, then change the "
                      "config or raise the limit, and run the same command again")

    def _record(self, kind: str, step: int, **fields: object) -> None:
        if jax.process_index() == 0:
            events.record(self._workdir, kind, step=step, **fields)


def apply_pending_rollback(workdir: str | Path, checkpoints: CheckpointManager) -> SkippedBatches:
    """Return the batches that the run in `workdir` skips, after discarding checkpoints that a rollback made invalid.

    Process 0 does this and informs the others. Call it before anything is restored.
    """
    return SkippedBatches.of(together(f"skipped_batches/{next(_turns)}", None,
                                  lambda _: json.loads(json.dumps(_settle(workdir, checkpoints).to_dict()))))


def agree(workdir: str | Path, passed: SkippedBatches, meta: JsonMapping, step: int) -> None:
    """Refuse a checkpoint whose steps had other batches; restore the record from it if the workdir has lost its own.

    Raises:
        RolledBack: the record is now on disk; start again with it.
    """
    theirs = SkippedBatches.of(meta.get("skipped_batches", {}))
    if passed.agrees(theirs, step):
        return
    if passed.batches:
        raise UserError("--workdir", f"{Path(workdir) / FILE} skips other batches than the first {step} steps of "
                        "its checkpoint did", "put that file back as it was, or delete it: the checkpoint has a copy")
    if jax.process_index() == 0:
        theirs.write(workdir)
    raise RolledBack


def _settle(workdir: str | Path, checkpoints: CheckpointManager) -> SkippedBatches:
    passed = SkippedBatches.read(workdir) or SkippedBatches()
    if passed.void_above is not None:
        checkpoints.discard(passed.void_above)
        from jaxtrain.checkpoint.local.snapshots import turn_back

        turn_back(workdir)
        passed = replace(passed, void_above=None)
        passed.write(workdir)
    return passed


def _describe(step: int, told: Mapping[str, float], spike: bool) -> str:
    if not spike:
        return f"step {step} is not finite (loss {told['loss']:.4g}, gradient norm {told['grad_norm']:.4g})"
    return (f"step {step} is a spike (loss {told['loss']:.4g}, z {told['loss_z']:.1f}; "
            f"gradient norm {told['grad_norm']:.4g}, z {told['grad_norm_z']:.1f})")

"""The status that trackers and MLflow give a run: one that was asked to stop is killed, not failed or running."""

import contextlib
import signal
from types import SimpleNamespace

import pytest

from jaxtrain.errors import UserError
from jaxtrain.observe.trackers.mlflow import Service
from jaxtrain.trainer.rollback import RolledBack
from jaxtrain.trainer.session import Interrupted
from jaxtrain.trainer.tracked import Tracked


@pytest.mark.parametrize(("error", "status", "in_mlflow"), [
    (None, "finished", "FINISHED"),
    (Interrupted(5, signal.SIGTERM), "stopped", "KILLED"),
    (Interrupted(5, signal.SIGINT), "stopped", "KILLED"),
    (KeyboardInterrupt(), "stopped", "KILLED"),
    (RolledBack(), "rolled_back", "KILLED"),
    (UserError("a", "b", "c"), "failed", "FAILED"),
    (RuntimeError(), "failed", "FAILED")])
def test_how_a_run_ended(error, status, in_mlflow):
    tracked, ended = Tracked.__new__(Tracked), []
    tracked._session = SimpleNamespace(watchdog=SimpleNamespace(phase=lambda name: contextlib.nullcontext()))
    tracked.sink = SimpleNamespace(finish=ended.append)
    with contextlib.suppress(BaseException), tracked:
        if error is not None:
            raise error
    assert ended == [status]
    service, said = Service(), {}
    service._id = "1"
    service._client = SimpleNamespace(set_tag=lambda run, key, value: said.update({key: value}),
                                      set_terminated=lambda run, value: said.update(ended=value))
    service.finish(*ended)
    assert said == {"status": status, "ended": in_mlflow}

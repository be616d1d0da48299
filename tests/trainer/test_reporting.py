"""The report of a run when it ends."""

from pathlib import Path
from types import SimpleNamespace

import jax

from jaxtrain.observe.goodput import Incarnation, account
from jaxtrain.trainer.reporting import end_of_run


def test_a_run_on_devices_that_have_a_price_says_what_it_has_cost(monkeypatch):
    life = account([Incarnation(0.0, {"init": 600.0, "step": 3000.0}, "", 0, (10, 3000.0), 10)])
    run = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(steps=10, sample_tokens=0)),
                          mesh=SimpleNamespace(size=16))
    session = SimpleNamespace(ledger=SimpleNamespace(account=lambda: life), workdir=Path("runs/big"))
    for kind, said in (("NVIDIA H100 80GB HBM3", "the run has cost about $48.00 for 1.00 h at $48.00 an hour"),
                       ("cpu", "")):
        monkeypatch.setattr(jax, "devices", lambda kind=kind: [SimpleNamespace(device_kind=kind)])
        assert end_of_run(run, session, None, 5, {}) == said
    assert end_of_run(run, session, None, 10, {}) == "nothing to do: runs/big has all 10 steps"

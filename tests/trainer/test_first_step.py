"""Imports and traces of a run before its first step: they are most of a start on a warm compilation cache."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import collections, json, os, sys
import jaxtrain.main
from jaxtrain import builder, compile_cache, run
from jaxtrain.config.load import load_config
from jaxtrain.objectives.next_token import NextToken
from jaxtrain.run.model_loss import ModelLoss
from jaxtrain.trainer import loop
from jaxtrain.trainer.observers import Observer

calls = collections.Counter()
for owner, name in ((run.Run, "_init"), (NextToken, "loss"), (ModelLoss, "evaluation"), (builder, "make_model"),
                    (run, "make_model")):
    def counted(*args, name=name, function=getattr(owner, name), **options):
        calls[name] += 1
        return function(*args, **options)
    setattr(owner, name, counted)

class FirstStep(Observer):
    def on_dispatch(self, step, metrics):
        print(json.dumps({"modules": sorted(sys.modules), "calls": calls}), flush=True)
        os._exit(0)

loop.train(load_config("configs/gpt.py:tiny", {}), sys.argv[1], observers=[FirstStep()])
"""


@pytest.fixture(scope="module")
def first_step(tmp_path_factory):
    done = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path_factory.mktemp("first_step") / "work"], cwd=ROOT,
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_few_runs_need_is_not_imported(first_step):
    few = {"orbax", "grain", "psutil", "tensorboardX", "jaxtrain.plan.search", "jaxtrain.plan.estimate",
           "jaxtrain.hub.initial_params", "jaxtrain.hub.export", "jaxtrain.tuning.rollouts"}
    assert sorted(few.intersection(first_step["modules"])) == []


def test_each_function_is_traced_once(first_step):
    """But for what makes the model: for shapes when the run is built, and for the first parameters."""
    assert first_step["calls"] == {"make_model": 2, "_init": 1, "loss": 1}

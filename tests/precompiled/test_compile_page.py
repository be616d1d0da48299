"""The commands that docs/compile.md shows, each as a process."""

import importlib.util
import json
import os
import re
import shlex

import pytest

from tests.tiny import QUICKLY, ROOT

BLOCKS = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs/compile.md").read_text(), re.M | re.S)


def run(forked, command, folder):
    """Run a command of the page, its folders moved elsewhere and its data made small."""
    words = shlex.split(command.replace("runs/", f"{folder}/"))
    module = "jaxtrain.main" if words[1] == "train" else f"jaxtrain {words[1]}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAXTRAIN_SECRET")}
    done = forked(["-m", *module.split(), *words[2:], f"--config.data.source={ROOT}/jaxtrain/data",
                   "--config.train.steps=4", "--config.optimizer.warmup_steps=1"], ROOT,
                  {**environment, "XLA_FLAGS": QUICKLY, "PYTHONPATH": str(ROOT)}, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done


@pytest.mark.slow
def test_what_is_compiled_here_starts_here(forked, tmp_path):
    first, second = BLOCKS[0].splitlines()
    compiled = run(forked, first, tmp_path)
    assert re.search(r"^step of 16 x 64: [\d.]+ s, .*B$", compiled.stdout, re.M)
    assert (tmp_path / "shipped" / "secret").stat().st_mode & 0o777 == 0o600
    trained = run(forked, second, tmp_path)
    assert f"loaded 4 compiled programs from {tmp_path}/compiled in" in trained.stderr
    assert "compiled the step" not in trained.stderr
    assert json.loads((tmp_path / "shipped/metrics.jsonl").read_text().splitlines()[-1])["step"] == 4


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("jax_cuda13_plugin"), reason="needs the extra aot-cuda")
def test_what_is_compiled_for_others(forked, tmp_path):
    (command,) = BLOCKS[1].splitlines()
    run(forked, command, tmp_path)
    assert len(list((tmp_path / "compiled-h100x8").glob("*.program"))) == 5

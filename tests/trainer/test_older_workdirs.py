"""A workdir that an earlier version of jaxtrain made goes on with the numbers of that version."""

import json
import tarfile
from pathlib import Path

import pytest

from jaxtrain.main import main
from tests.tiny import devices

# Made at commit 9682e830 with these flags and 4 steps, on 4 CPU devices; the losses are those of that commit, too.
WORKDIR = Path(__file__).parent / "workdir_9682e830.tar.xz"
FLAGS = ["model.num_layers=1", "model.embed_dim=8", "model.num_heads=2", "model.mlp_dim=16", "model.max_seq_len=16",
         "model.vocab_size=264", "data.tokenizer=bytes", "data.seq_len=16", "data.global_batch_size=8",
         "optimizer.warmup_steps=1", "optimizer.schedule=constant", "train.eval_every=0", "checkpoint.every=4",
         "train.log_every=1", "train.sample_tokens=0", "train.ema_decay=0.9", "optimizer.moment_dtype=int8",
         "mesh.fsdp=2", "mesh.data=2"]
LOSSES = [5.410962104797363, 5.374118804931641, 5.338253974914551]  # of steps 6 to 8; that of step 5: 5.431285858
EVALUATED = {"eval_loss": 5.296459197998047, "eval_loss_ema": 5.467580318450928}


@pytest.mark.slow
def test_a_workdir_of_9682e830_goes_on(tmp_path, capsys):
    (text := tmp_path / "text").mkdir()
    for i in range(4):
        (text / f"{i}.txt").write_text("".join(
            f"some words and others, again and again, {n * n % 97}. " for n in range(150)))
    with tarfile.open(WORKDIR) as made:
        made.extractall(tmp_path / "run", filter="data")
    with devices(4):
        status = main(["--config=configs/gpt.py:tiny", f"--config.data.source={text}",
                       f"--config.data.cache_dir={tmp_path}/cache", *(f"--config.{flag}" for flag in FLAGS),
                       "--config.train.steps=8", "--may_change=train.steps", f"--workdir={tmp_path}/run"])
    assert status == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line][-3:] == pytest.approx(LOSSES, rel=1e-5)
    assert {key: lines[-1][key] for key in EVALUATED} == pytest.approx(EVALUATED, rel=1e-5)

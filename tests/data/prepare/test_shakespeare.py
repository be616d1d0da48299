"""The commands of docs/data.md for character-level Shakespeare, on a small text and with a small model."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from jaxtrain.commands.prepare import main as prepare
from jaxtrain.config.load import load_config
from jaxtrain.data import open_corpus
from jaxtrain.main import main as train
from tests.tiny import devices

ROOT = Path(__file__).parents[3]
SMALL = ["model.num_layers=1", "model.embed_dim=16", "model.num_heads=2", "model.vocab_size={}", "data.seq_len=32",
         "model.max_seq_len=32", "train.steps=20", "train.eval_every=10", "optimizer.warmup_steps=1",
         "optimizer.learning_rate=0.01", "checkpoint.every=0"]


@pytest.mark.slow
def test_the_documented_commands_train_on_nine_tenths_of_the_text(tmp_path, monkeypatch):
    section = (ROOT / "docs/data.md").read_text().split("## Character-level Shakespeare")[1]
    block = re.search(r"```text\n(.*?)```", section, re.S)[1].replace("FOLDER", str(tmp_path))
    block = re.sub(r"\b(corpora|runs)/", rf"{tmp_path}/\1/", block)
    shell = block.partition("jaxtrain prepare ")[0]
    commands = re.findall(r"^(jaxtrain \w+|python -m \S+) (.*)$", block, re.M)
    text = "".join(f"KING {n}:\nWhat, art thou number {n}?\n\n" for n in range(200))
    (tmp_path / "input.txt").write_text(text)
    subprocess.run(["bash", "-euc", shell], check=True)
    (prepared, flags), (trained, more) = commands
    assert (prepared, trained) == ("jaxtrain prepare", "python -m jaxtrain.main")
    assert prepare(shlex.split(flags)) == 0

    corpus = open_corpus(tmp_path / "corpora/shakespeare_char")
    cut = len(text) * 9 // 10
    for split, part in (("train", text[:cut]), ("eval", text[cut:])):
        tokens = getattr(corpus, split)
        assert corpus.tokenizer.decode(tokens.read(0, tokens.num_tokens)) == part
    assert corpus.tokenizer.vocab_size == len(set(text)) + 1

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    small = [f"--config.{word.format(len(set(text)) + 1)}" for word in SMALL]
    with devices(1):
        assert train([*shlex.split(more), *small, f"--config.data.source={corpus.path}"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "runs/shakespeare_char/metrics.jsonl").read_text().splitlines()]
    judged = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert len(judged) == 2 and judged[1] < judged[0] < 4
    kept = json.loads((tmp_path / "runs/shakespeare_char/tokenizer/tokenizer_record.json").read_text())
    assert kept["characters"] == "".join(sorted(set(text)))


def test_the_settings_are_nanogpts():
    c = load_config(ROOT / "configs/shakespeare_char.py")
    assert (c.model.num_layers, c.model.num_heads, c.model.embed_dim, c.model.vocab_size) == (6, 6, 384, 66)
    assert (c.data.seq_len, c.data.global_batch_size, c.train.steps) == (256, 64, 5000)
    assert (c.optimizer.learning_rate, c.optimizer.warmup_steps, c.optimizer.b2) == (1e-3, 100, 0.99)
    assert (c.optimizer.weight_decay, c.optimizer.clip_norm, c.optimizer.final_fraction) == (0.1, 1.0, 0.1)

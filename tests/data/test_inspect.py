"""The batches that `inspect` prints are those that a run gets."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.commands.inspect import main
from jaxtrain.config.load import load_config
from jaxtrain.config.schema import DataConfig
from jaxtrain.data import load_corpus
from jaxtrain.data.corpus.origins import origins
from jaxtrain.data.loading.batches import eval_batches, train_batches
from jaxtrain.data.prepare.prepare import Options
from jaxtrain.data.prepare.prepare import prepare as make

TINY = "--config=configs/gpt.py:tiny"


def test_it_shows_the_rows_of_a_step(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "a.jsonl"
    text.write_text("".join(json.dumps({"text": f"number {i} " + "ab " * (i % 9)}) + "\n" for i in range(300)))
    make([str(text)], tmp_path / "corpus", Options(eval_fraction=0.2))
    keys = [TINY, f"--config.data.source={tmp_path / 'corpus'}", "--config.data.global_batch_size=3"]

    assert main([*keys, "--step=7", "--token_ids"]) == 0
    shown = capsys.readouterr().out
    overrides = {"data.source": str(tmp_path / "corpus"), "data.global_batch_size": 3}
    config = load_config("configs/gpt.py:tiny", overrides).data
    batch = train_batches(config, load_corpus(config))[7]
    assert shown.count("row ") == 3 and "\033" not in shown
    for i in range(3):
        assert f"row {i}: 64 tokens, {batch['segments'][i].max()} documents" in shown
        assert f"{int((batch['weights'][i] > 0).sum())} carry loss" in shown
        last = np.flatnonzero(np.diff(batch["segments"][i], prepend=0))[-1]
        assert " ".join(map(str, batch["tokens"][i][last:])) in shown

    (tmp_path / "skipped_batches.json").write_text('{"batches": [2, 5, 9]}')
    assert main([*keys, "--step=5", "--token_ids", f"--workdir={tmp_path}"]) == 0  # the sixth that is not passed over
    assert capsys.readouterr().out == shown

    assert main([*keys, "--step=7", "--row=2", "--colour=always"]) == 0
    coloured = capsys.readouterr().out
    assert coloured.count("row ") == 1
    assert coloured.count("\033[38;5;240m") == batch["segments"][2].max() > 1  # the first token of each document
    for mistake, words in (("--row=3", "--row: 3 is out of range"), ("--step=-1", "--step: -1 is out of range"),
                           ("--workdir=/nope", "--workdir: /nope is not a folder"),
                           ("--stop=1", "did you mean '--step'"), ("--config.data.sauce=x", "did you mean 'source'")):
        assert main([*keys, mistake]) == 2
        assert words in capsys.readouterr().err
    assert main([*keys, "--split=eval", "--step=100"]) == 2
    capsys.readouterr()
    assert main([*keys, "--config.rl.prompts=a", "--config.rl.reward=b", "--config.train.eval_every=0",
                 "--config.rl.group_size=3", "--config.rl.max_new_tokens=8"]) == 2
    assert capsys.readouterr().err == ("rl.prompts: batches are made of the answers of the model as it trains; "
                                       "read WORKDIR/rollouts/STEP.jsonl of a run, which has them\n")


@pytest.mark.slow
def test_it_says_where_each_document_is_from(tmp_path, monkeypatch):
    """The place leads back to the text, in plain and compressed lines, Parquet, files, and whatever packs them."""
    import gzip

    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    texts = [f"number {i} " + "ab " * (i % 9) for i in range(60)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text(lines)
    (tmp_path / "in/b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "in/c.txt").write_text("a file " * 9)
    pq.write_table(pa.table({"text": texts}), tmp_path / "in/d.parquet", row_group_size=7)
    make([str(tmp_path / "in")], tmp_path / "corpus", Options(eval_fraction=0.1, task_bytes=900))

    def text_at(words):
        name, *place = words.split()
        if name == "a.jsonl":
            return json.loads(lines.encode()[int(place[-1]):].partition(b"\n")[0])["text"]
        if name == "b.jsonl.gz":
            return texts[int(place[-1]) - 1]
        if name == "d.parquet":
            return texts[7 * int(place[1]) + int(place[3])]
        return "a file " * 9

    for packing in ("concat", "best_fit"):
        mixture = {"one": {"source": str(tmp_path / "corpus")}, "two": {"source": str(tmp_path / "corpus")}}
        config = DataConfig(mixture=mixture, seq_len=64, global_batch_size=8, packing=packing)
        corpus = load_corpus(config)
        batches, seen = train_batches(config, corpus), set()
        for step in range(12):
            batch = batches[step]
            for row in range(8):
                froms = origins(corpus, "train", *batches.origin(step, row))
                assert len(froms) == batch["segments"][row].max()
                for segment, words in enumerate(froms, start=1):
                    source, _, words = words.partition(": ")
                    ids = batch["tokens"][row][batch["segments"][row] == segment]
                    assert corpus.tokenizer.decode(ids) in text_at(words) and source in mixture
                    seen.add(words.split()[0])
        assert seen == {"a.jsonl", "b.jsonl.gz", "c.txt", "d.parquet"}
        evaluation = eval_batches(config, corpus)
        for row in range(8):
            for words in origins(corpus, "eval", *evaluation.origin(0, row)):
                assert text_at(words.partition(": ")[2]) and words.startswith(("one: ", "two: "))

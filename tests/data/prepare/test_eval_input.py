"""Evaluation text of one's own: nothing of it is trained on, and a mixture takes what each source has."""

import json

import numpy as np
import pytest

from jaxtrain.commands.prepare import main
from jaxtrain.config.schema import DataConfig
from jaxtrain.data import load_corpus, open_corpus
from jaxtrain.data.loading.batches import eval_batches, packing, train_batches
from jaxtrain.data.prepare.prepare import Options, prepare
from jaxtrain.errors import UserError


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train.txt").write_text("".join(f"line {n} to learn\n" for n in range(100)))
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps({"text": f"{n} to judge"}) + "\n" for n in range(50)))
    return tmp_path


def read(corpus, split):
    tokens = getattr(corpus, split)
    return corpus.tokenizer.decode(tokens.read(0, tokens.num_tokens)) if tokens.num_tokens else ""


def made(texts, name, *flags):
    assert main([*flags, f"--output={texts / name}"]) == 0
    return open_corpus(texts / name)


@pytest.mark.parametrize("workers", [1, 2])
def test_each_input_is_its_own_split(texts, workers):
    corpus = made(texts, "both", f"--input={texts}/train.txt", f"--eval_input={texts}/eval.jsonl", "--format=text",
                  "--task_bytes=300", f"--workers={workers}")
    assert read(corpus, "train") == (texts / "train.txt").read_text()
    assert read(corpus, "eval") == "".join(f"{n} to judge" for n in range(50))
    manifest = json.loads((texts / "both" / "manifest.json").read_text())
    assert {(piece["name"], piece.get("split")) for task in manifest["inputs"] for piece in task} == {
        ("train.txt", None), ("eval.jsonl", "eval")}
    # Again, and there is nothing to do; with other evaluation input it is another corpus.
    made(texts, "both", f"--input={texts}/train.txt", f"--eval_input={texts}/eval.jsonl", "--format=text",
         "--task_bytes=300")
    with pytest.raises(UserError, match="holds another corpus"):
        prepare([str(texts / "train.txt")], texts / "both", Options(format="text", task_bytes=300, eval_fraction=0))


def test_evaluation_text_that_is_also_trained_on_can_be_left_out(texts):
    (texts / "again.txt").write_text((texts / "train.txt").read_text())
    (texts / "new.txt").write_text("something else")
    options = Options(deduplicate=True, eval_input=(str(texts / "again.txt"), str(texts / "new.txt")))
    corpus = prepare([str(texts / "train.txt")], texts / "out", options)
    assert read(corpus, "train") == (texts / "train.txt").read_text() and read(corpus, "eval") == "something else"


@pytest.mark.parametrize(("flags", "words"), [
    (["--input={}/train.txt", "--eval_input={}/train.txt"], "--eval_input: {}/train.txt is also a part of --input"),
    (["--input={}/train.txt", "--eval_input={}/eval.jsonl", "--eval_fraction=0.1"],
     "--eval_fraction: with --eval_input, all of --input is for training"),
    ([], "--input: it is missing"),
    (["--input={}/train.txt", "--eval_input={}/none"], "{}/none does not exist"),
    (["--eval_input={}/eval.jsonl", "--tokenizer=characters", "--format=text"], "there is no --input"),
])
def test_a_mistake_is_one_line(texts, capsys, flags, words):
    assert main([*(flag.format(texts) for flag in flags), f"--output={texts}/out"]) == 2
    error = capsys.readouterr().err
    assert words.format(texts) in error and error.count("\n") == 1


def test_a_mixture_of_training_only_and_evaluation_only_sources(texts, capsys):
    made(texts, "learn", f"--input={texts}/train.txt", "--eval_fraction=0")
    made(texts, "judge", f"--eval_input={texts}/eval.jsonl", "--format=text")
    assert "the train split is empty" in capsys.readouterr().out
    alone = DataConfig(source=str(texts / "learn"), seq_len=32, global_batch_size=4)
    config = DataConfig(mixture={"learn": {"source": str(texts / "learn")}, "judge": {"source": str(texts / "judge")}},
                        seq_len=32, global_batch_size=4)
    corpus = load_corpus(config)
    batches, judged = train_batches(config, corpus), eval_batches(config, corpus)
    assert list(batches.epochs(10)) == ["learn"] and "judge: evaluation only" in packing(config, corpus)
    texts_of = [corpus.tokenizer.decode(row) for step in range(9) for row in batches[step]["tokens"]]
    assert all("judge" not in text for text in texts_of) and "learn" in "".join(texts_of)
    eval_tokens = open_corpus(texts / "judge").eval.num_tokens
    assert sum(judged[step]["weights"].sum() for step in range(judged.num_batches)) == eval_tokens - 50
    only_judged = DataConfig(source=str(texts / "judge"), seq_len=32, global_batch_size=4)
    with pytest.raises(UserError, match=r"data\.source: it has evaluation text, and none to train on"):
        train_batches(only_judged, load_corpus(only_judged))
    assert eval_batches(alone, load_corpus(alone)) is None
    assert np.array_equal(judged[0]["tokens"], eval_batches(only_judged, load_corpus(only_judged))[0]["tokens"])


def test_the_vocabulary_of_characters_is_that_of_the_training_text(texts, capsys):
    corpus = made(texts, "chars", f"--input={texts}/train.txt", "--eval_fraction=0", "--tokenizer=characters")
    want = "".join(sorted(set((texts / "train.txt").read_text())))
    assert corpus.tokenizer.characters == want and corpus.tokenizer.vocab_size == len(want) + 1
    said = json.loads((texts / "chars" / "manifest.json").read_text())["tokenizer"]
    assert (said["characters"], said["file"]) == (want, "characters.json")
    assert read(corpus, "train") == (texts / "train.txt").read_text()
    # Evaluation text does not extend it: what it lacks is refused, and text within it takes its ids.
    flags = [f"--input={texts}/train.txt", "--tokenizer=characters", f"--output={texts}/out"]
    (texts / "eval.txt").write_text("to earn? line")
    assert main([*flags, f"--eval_input={texts}/eval.txt"]) == 2
    assert "has no '?' (U+003F), as in 'to earn? line'" in capsys.readouterr().err
    (texts / "eval.txt").write_text("to earn line")
    assert main([*flags[:2], f"--output={texts}/fits", f"--eval_input={texts}/eval.txt"]) == 0
    assert open_corpus(texts / "fits").tokenizer.fingerprint == corpus.tokenizer.fingerprint


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--workers=3"], ["--workers=2", "--deduplicate"]])
def test_characters_with_several_workers(texts, flags):
    one = made(texts, "one", f"--input={texts}/eval.jsonl", "--tokenizer=characters", "--format=text",
               "--task_bytes=300", *flags[1:])
    many = made(texts, "many", f"--input={texts}/eval.jsonl", "--tokenizer=characters", "--format=text",
                "--task_bytes=300", *flags)
    assert one.manifest_hash == many.manifest_hash
    assert "\n" in one.tokenizer.characters  # samples begin behind a line end, which no document here has


def test_characters_are_collected_after_the_cleaning_steps(texts):
    (texts / "a.txt").write_text("write to Zed@example.org")
    corpus = made(texts, "clean", f"--input={texts}/a.txt", "--tokenizer=characters", "--eval_fraction=0", "--filters",
                  "pii")
    assert corpus.tokenizer.characters == "".join(sorted({"\n", *read(corpus, "train")}))
    assert "Z" not in corpus.tokenizer.characters

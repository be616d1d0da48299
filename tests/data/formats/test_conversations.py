"""Records of conversations, from a file to what a step is trained on."""

import gzip
import json
import math
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.commands.inspect import main as inspect
from jaxtrain.commands.prepare import main
from jaxtrain.commands.train_tokenizer import main as train_tokenizer
from jaxtrain.config.schema import DataConfig
from jaxtrain.data import PackedRows, open_corpus
from jaxtrain.data.formats.conversations import Example, Unusable, example_of, format_of
from jaxtrain.data.loading.batches import rows
from jaxtrain.data.prepare.prepare import Options, prepare
from jaxtrain.errors import UserError
from jaxtrain.main import main as train
from tests.data.formats.test_array_record import write as write_array_record
from tests.tiny import devices

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples/chat"
ASKED, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
OTHER = {"role": "assistant", "content": "b"}
CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}


def write(path: Path, records) -> Path:
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(records), path)
    elif path.suffix == ".array_record":
        write_array_record(path, [json.dumps(record).encode() for record in records])
    else:
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def talks(count: int) -> list[dict]:
    return [{"messages": [{"role": "user", "content": f"number {i}?" + " why" * (i % 7)},
                          {"role": "assistant", "content": "because " * (i % 5) + f"{i}."}] * (1 + i % 3)}
            for i in range(count)]


def plain(messages) -> list[tuple[int, bool]]:
    """Return the result of our template for bytes, written again: ids and whether they are learnt, the end included."""
    found = []
    for i, message in enumerate(messages):
        learnt = message["role"] == "assistant"
        found += [(byte, False) for byte in ("\n" * (i > 0) + message["role"] + ": ").encode()]
        found += [(byte, learnt) for byte in message["content"].encode()] + [(256, True)] * learnt
    return found if learnt else [*found, (256, False)]


def documents(tokens) -> list[list[tuple[int, bool]]]:
    found = []
    for shard in tokens.shards:
        ids, trained = shard.tokens.tolist(), (shard.trained > 0).tolist()
        found += [list(zip(ids[a:b], trained[a:b], strict=True))
                  for a, b in zip(shard.offsets[:-1].tolist(), shard.offsets[1:].tolist(), strict=True)]
    return found


# ------------------------------------------------------------------------------------------------------------- records

@pytest.mark.parametrize(("form", "record", "prompt", "completions"), [
    ("messages", {"messages": [ASKED, SAID | {"name": None, "tool_calls": None}]}, [], [[ASKED, SAID]]),
    ("messages", {"messages": json.dumps([ASKED, SAID])}, [], [[ASKED, SAID]]),
    ("messages", {"messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]}, [],
     [[ASKED, SAID]]),
    ("messages", {"messages": [ASKED, SAID | {"reasoning_content": "hm"}]}, [],
     [[ASKED, SAID | {"reasoning_content": "hm"}]]),
    ("messages", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, [],
     [[ASKED, SAID]]),
    ("messages", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
                  "system": "s"}, [], [[{"role": "system", "content": "s"}, ASKED, SAID]]),
    ("messages", {"conversations": [{"from": "human", "value": "q"},
                                    {"from": "function_call", "value": json.dumps(CALL)},
                                    {"from": "observation", "value": "3"}, {"from": "gpt", "value": "a"}]}, [],
     [[ASKED, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
       {"role": "tool", "content": "3"}, SAID]]),
    ("alpaca", {"instruction": "q", "output": "a"}, [ASKED], [[SAID]]),
    ("alpaca", {"instruction": "q", "input": "", "output": "a"}, [ASKED], [[SAID]]),
    ("alpaca", {"instruction": "Sum:", "input": "1 2", "output": "a", "system": "s"},
     [{"role": "system", "content": "s"}, ASKED | {"content": "Sum:\n1 2"}], [[SAID]]),
    ("alpaca", {"instruction": "q", "input": None, "output": "b", "history": [["q", "a"]]}, [ASKED],
     [[SAID, ASKED, OTHER]]),
    ("prompt_completion", {"prompt": "q", "completion": " a"}, "q", [" a"]),
    ("prompt_completion", {"prompt": [ASKED], "completion": [SAID]}, [ASKED], [[SAID]]),
    ("prompt_completion", {"prompt": [ASKED], "completion": "a"}, [ASKED], [[SAID]]),
    ("prompt_completion", {"prompt": "q", "completion": " a", "label": "short"}, "q", [" a"]),
    ("preference", {"prompt": "q", "chosen": "a", "rejected": "b"}, "q", ["a", "b"]),
    ("preference", {"prompt": [ASKED], "chosen": [SAID], "rejected": [OTHER]}, [ASKED], [[SAID], [OTHER]]),
    ("preference", {"prompt": "q", "chosen": [SAID], "rejected": [OTHER]}, [ASKED], [[SAID], [OTHER]]),
    ("preference", {"prompt": "q", "chosen": [ASKED, SAID], "rejected": [ASKED, OTHER]}, [ASKED], [[SAID], [OTHER]]),
    ("preference", {"chosen": [ASKED, SAID], "rejected": [ASKED, OTHER]}, [ASKED], [[SAID], [OTHER]]),
    ("preference", {"chosen": "q? one", "rejected": "q? other"}, "q? ", ["one", "other"]),
], ids=str)
def test_every_form_of_a_record_becomes_one(form, record, prompt, completions):
    assert Example.from_bytes(example_of(record, form, "here")) == Example(prompt, completions, None)


def test_tools_are_as_templates_want_them():
    call = {"type": "function", "function": {"name": "add", "arguments": '{"b": 1, "a": 2}'}}
    record = {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": '[{"x": 1}]'}
    example = Example.from_bytes(example_of(record, "messages", "here"))
    said = example.completions[0][1]
    assert said["tool_calls"][0]["function"] == {"name": "add", "arguments": {"b": 1, "a": 2}}
    assert list(said["tool_calls"][0]["function"]["arguments"]) == ["b", "a"] and example.tools == [{"x": 1}]


@pytest.mark.parametrize(("form", "record", "words"), [
    ("messages", {"messages": []}, "no messages"), ("messages", {"messages": None}, "not a list of messages"),
    ("messages", {"messages": [ASKED | {"role": "bird"}]}, "role 'bird' is not known"),
    ("messages", {"messages": [ASKED | {"role": ["user"]}]}, r"role \['user'\] is not known"),
    ("messages", {"messages": [SAID | {"tool_calls": 3}]}, "tool_calls that are not a list"),
    ("messages", {"messages": [SAID | {"tool_calls": "add(1, 2)"}]}, "tool_calls that are not a list"),
    ("messages", {"messages": [ASKED | {"content": [{"type": "image"}]}]}, "content that is not text"),
    ("messages", {"messages": [ASKED | {"content": None}]}, "content that is not text"),
    ("messages", {"conversations": [{"from": "gpt", "text": "a"}]}, "a turn without 'value'"),
    ("messages", {"conversations": [{"from": "bird", "value": "a"}]}, "role 'bird' is not known"),
    ("messages", {"conversations": [{"from": "function_call", "value": "add(1)"}]}, "function_call that is not JSON"),
    ("messages", {"conversations": [{"from": "gpt", "value": "a"}], "system": 3}, "system prompt that is not text"),
    ("alpaca", {"instruction": ["q"], "output": "a"}, "instruction, input or output that is not text"),
    ("alpaca", {"instruction": "q", "input": {}, "output": "a"}, "instruction, input or output that is not text"),
    ("alpaca", {"instruction": "q", "output": None}, "instruction, input or output that is not text"),
    ("alpaca", {"instruction": "q", "output": "a", "history": "q a"}, "history that is not a list of pairs"),
    ("alpaca", {"instruction": "q", "output": "a", "history": [["q", 3]]}, "output that is not text"),
    ("preference", {"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are equal"),
], ids=str)
def test_a_record_that_cannot_be_used_says_why(form, record, words):
    with pytest.raises(Unusable, match=words):
        example_of(record, form, "here")


@pytest.mark.parametrize(("fields", "want"), [
    ("text id", "text"), ("prompt messages", "messages"), ("conversations", "messages"), ("other", "text"),
    ("prompt completion", "prompt_completion"), ("chosen rejected", "preference"),
    ("prompt completion label", "labelled"), ("instruction input output", "alpaca"),
    ("instruction", "text")])
def test_what_a_record_is_shows_in_its_fields(fields, want):
    assert format_of(set(fields.split()), "text", "a") == want


def test_a_record_that_may_be_read_in_two_ways_is_refused():
    with pytest.raises(UserError, match="a fits several formats: text, messages; name one with --format"):
        format_of({"text", "messages"}, "text", "a")


# ------------------------------------------------------------------------------------------------------------- corpora

@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.array_record"])
def test_a_corpus_has_every_conversation_and_what_of_it_is_learnt(tmp_path, name):
    options = Options(eval_fraction=0.2, task_bytes=900)
    made = prepare([str(write(tmp_path / name, talks(60)))], tmp_path / "out", options)
    want = [plain(talk["messages"]) for talk in talks(60)]
    found = documents(made.train) + documents(made.eval)
    assert sorted(found) == sorted(want) and made.eval.num_documents > 3
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["options"]["format"] == "messages" and manifest["options"]["train_on"] == "assistant"
    assert manifest["chat"]["name"] == "plain" and len(manifest["chat"]["sha256"]) == 64
    learnt = sum(shard["learnt"] for split in manifest["splits"].values() for shard in split["shards"])
    assert learnt == sum(flag for document in want for _, flag in document)


def test_any_number_of_workers_writes_the_same_bytes(tmp_path):
    source = str(write(tmp_path / "a.jsonl", talks(80)))
    options = Options(eval_fraction=0.1, task_bytes=2500, deduplicate=True)
    one, two = (prepare([source], tmp_path / str(workers), options, workers) for workers in (1, 2))
    for path in sorted(one.path.iterdir()):
        assert path.read_bytes() == (two.path / path.name).read_bytes(), path.name
    assert any(path.name.endswith(".trained.bin") for path in two.path.iterdir())
    whole = prepare([source], tmp_path / "whole", Options(eval_fraction=0.1))
    assert documents(whole.train) == documents(one.train)


def test_learning_everything_needs_no_mask(tmp_path):
    made = prepare([str(write(tmp_path / "a.jsonl", talks(9)))], tmp_path / "out",
                   Options(eval_fraction=0, train_on="all"))
    assert not made.train.masked
    assert made.train.read(0, made.train.num_tokens).tolist() == [
        id for talk in talks(9) for id, _ in plain(talk["messages"])]


def test_labels_are_kept_with_what_is_learnt(tmp_path):
    records = [{"prompt": f"{i}? ", "completion": "no" if i % 3 else "yes", "label": i % 3 == 0} for i in range(30)]
    made = prepare([str(write(tmp_path / "a.jsonl", records))], tmp_path / "out", Options(eval_fraction=0))
    assert made.labelled and not made.pairs
    shard, = made.train.shards
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["splits"]["train"]["shards"][0]["learnt"] == int((np.asarray(shard.trained) > 0).sum())
    for start, stop in pairwise(shard.offsets.tolist()):
        good = b"yes" in bytes(np.asarray(shard.tokens[start:stop - 1]).tolist())
        assert set(shard.trained[start:stop].tolist()) == {0, 1 if good else 2}


def test_preferences_are_pairs_in_one_split(tmp_path):
    records = [{"prompt": f"{i % 40}? ", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(120)]
    made = prepare([str(write(tmp_path / "a.jsonl", records))], tmp_path / "out",
                   Options(eval_fraction=0.3, task_bytes=1500))
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["options"]["format"] == "preference" and len(made.train.shards) > 2
    seen: dict[str, set[str]] = {}
    for split in ("train", "eval"):
        for shard in getattr(made, split).shards:
            assert (len(shard.offsets) - 1) % 2 == 0
        found = documents(getattr(made, split))
        for chosen, rejected in zip(found[::2], found[1::2], strict=True):
            texts = [bytes(id for id, _ in one[:-1]).decode() for one in (chosen, rejected)]
            prompt, _, number = texts[0].partition(" yes ")
            assert texts[1] == f"{prompt} no {number}"
            for one in (chosen, rejected):
                assert [flag for _, flag in one] == [False] * (len(prompt) + 1) + [True] * (len(one) - len(prompt) - 1)
            seen.setdefault(prompt, set()).add(split)
    assert len(seen) == 40 and all(len(splits) == 1 for splits in seen.values())
    assert made.train.num_documents + made.eval.num_documents == 240 and made.eval.num_documents > 20


def test_what_the_system_says_to_all_makes_nobody_alike(tmp_path):
    system = {"role": "system", "content": " ".join(f"rule{i}" for i in range(500))}
    records = [{"messages": [system, {"role": "user", "content": f"what is {i}"}, {"role": "assistant", "content": (
        f"{i} {i + 1} {i + 2}")}]} for i in range(100)]
    records.append({"messages": records[7]["messages"][1:]})  # without it
    call = {"function": {"name": "look", "arguments": {"at": "one"}}}
    records += [{"messages": [ASKED, {"role": "assistant", "tool_calls": [call | {"id": "xyz"[i] * 9}]}]}
                for i in range(3)]
    made = prepare([str(write(tmp_path / "a.jsonl", records))], tmp_path / "out",
                   Options(eval_fraction=0, deduplicate="near"))
    manifest = json.loads((made.path / "manifest.json").read_text())
    assert made.train.num_documents == 103 and manifest["left_out"] == {"nearly equal to another": 1}


@pytest.mark.parametrize("deduplicate", ["exact", "near"])
def test_what_cannot_be_used_is_left_out_before_documents_are_compared(tmp_path, deduplicate):
    asked = {"role": "user", "content": " ".join(f"word{i}" for i in range(300))}
    records = [{"messages": [asked, SAID | {"content": said}], "licence": f"of {i}"}
               for i, said in enumerate(("", "", "yes", "yes"))]
    made = prepare([str(write(tmp_path / "a.jsonl", records))], tmp_path / "out",
                   Options(eval_fraction=0, deduplicate=deduplicate, licence_of="record:licence"))
    manifest = json.loads((made.path / "manifest.json").read_text())
    assert made.train.num_documents == 1 and manifest["licences"] == {"of 2": 1}
    assert manifest["left_out"] == {"no turn to learn": 2, "equal to another": 1}
    assert manifest["steps"] == [{"step": f"deduplicate={deduplicate}", "seen": 2, "changed": 0,
                                  "removed": {"equal to another": 1}}]


@pytest.mark.parametrize("licence_of", ["mit", "record:licence"])
def test_licences_are_counted_by_document(tmp_path, licence_of):
    records = [{"prompt": f"{i}? ", "chosen": f"yes {i}", "rejected": f"no {i}", "licence": "mit"} for i in (0, 0, 1)]
    made = prepare([str(write(tmp_path / "a.jsonl", records))], tmp_path / "out",
                   Options(eval_fraction=0, deduplicate=True, licence_of=licence_of))
    manifest = json.loads((made.path / "manifest.json").read_text())
    assert made.train.num_documents == 4 and manifest["licences"] == {"mit": 4}
    assert manifest["steps"][0]["seen"] == 3  # records


def test_another_template_makes_another_corpus(tmp_path):
    source, template = write(tmp_path / "a.jsonl", talks(9)), tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}:{% endfor %}")
    options = Options(eval_fraction=0, chat_template=str(template))
    made = prepare([str(source)], tmp_path / "out", options)
    assert prepare([str(source)], tmp_path / "out", options).manifest_hash == made.manifest_hash
    template.write_text(template.read_text() + "!")
    with pytest.raises(UserError, match="holds another corpus"):
        prepare([str(source)], tmp_path / "out", options)


def test_a_template_that_changes_meanwhile_is_noticed(tmp_path):
    source, template = write(tmp_path / "a.jsonl", talks(9)), tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}:{% endfor %}")

    def edit(line):
        if line.startswith("tokens: 2 of"):
            template.write_text(template.read_text() + "!")

    with pytest.raises(UserError, match="--chat_template: its files differ between machines, or were changed"):
        prepare([str(source)], tmp_path / "out", Options(chat_template=str(template), task_bytes=300), say=edit)


def test_what_is_left_out_is_counted(tmp_path, capsys):
    records = [*talks(5), {"messages": [ASKED]}, {"messages": [ASKED, SAID | {"content": ""}]}, {"messages": []}]
    assert main([f"--input={write(tmp_path / 'a.jsonl', records)}", f"--output={tmp_path / 'out'}", "--workers=1",
                 "--eval_fraction=0"]) == 0
    shown = capsys.readouterr().out
    assert "dropped: 2 (no turn to learn)" in shown and "dropped: 1 (no messages)" in shown
    assert "format messages, chat template plain" in shown and "% of the tokens are trained on" in shown


def test_files_without_records_among_conversations_are_counted(tmp_path):
    (tmp_path / "in").mkdir()
    write(tmp_path / "in/b.jsonl", talks(5))
    for name in ("README.md", "c.txt"):
        (tmp_path / "in" / name).write_text("about them " * 50)
    write_array_record(tmp_path / "in/d.array_record", [b"text"] * 9)
    corpus = prepare([str(tmp_path / "in")], tmp_path / "out", Options(eval_fraction=0, task_bytes=30))
    assert corpus.train.num_documents == 5
    assert json.loads((tmp_path / "out/manifest.json").read_text())["left_out"] == {"no records": 3}


def test_a_corpus_of_nothing_is_refused(tmp_path, capsys):
    source = write(tmp_path / "a.jsonl", [{"messages": []}])
    assert main([f"--input={source}", f"--output={tmp_path / 'out'}", "--workers=1", "--train_on=all"]) == 2
    assert "none of its documents can be used (1 were dropped: no messages)" in capsys.readouterr().err


@pytest.mark.parametrize(("records", "flags", "words"), [
    ([{"messages": [ASKED]}], [], "nothing of the train split would be trained on; dropped: 1 (no turn to learn)"),
    ([{"prompt": "", "completion": "a"}], [], "every token of the train split would be trained on"),
    ([{"messages": [ASKED, SAID]}, {"text": "x"}], [], "a.jsonl, line 2 has no field 'messages'"),
    ([{"messages": [ASKED, SAID], "text": "x"}], [], "name one with --format"),
    ([{"prompt": "q", "chosen": "a"}], [], "a.jsonl has the field 'chosen' and no 'rejected'; add 'rejected'"),
    ([{"prompt": "q", "answer": "a"}], [], "a.jsonl has the field 'prompt' and no 'completion'"),
    ([{"messages": [ASKED, SAID]}], ["--format=message"], "did you mean 'messages'"),
    ([{"messages": [ASKED, SAID]}], ["--train_on=user"], "--train_on: 'user' is not known"),
    ([{"messages": [ASKED, SAID]}], ["--chat_template=none.jinja"], "none.jinja cannot be read"),
    ([{"chosen": "a", "rejected": "b"}], ["--format=preference", "--train_on=all"], "use --train_on=assistant"),
    ([{"prompt": "q", "completion": "a", "label": False}], ["--train_on=all"], "use --train_on=assistant"),
    ([{"prompt": "q", "completion": "a", "label": 1}], [], "line 1 has the label 1; write true or false, or leave"),
    ([{"messages": [ASKED, SAID]}], [f"--input={EXAMPLES.parent / 'embed_train_step.py'}", "--format=messages"],
     "nothing of the train split would be trained on; dropped: 1 (no records)"),
], ids=str)
def test_a_mistake_is_one_line(tmp_path, capsys, records, flags, words):
    source = write(tmp_path / "a.jsonl", records)
    flags = flags if any(flag.startswith("--input") for flag in flags) else [f"--input={source}", *flags]
    assert main([f"--output={tmp_path / 'out'}", "--workers=1", "--eval_fraction=0", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and not (tmp_path / "out/manifest.json").exists()
    assert error.splitlines()[-1].startswith("--")


def test_preferences_cannot_be_learnt_whole_even_if_only_found_out_later(tmp_path):
    source = write(tmp_path / "a.jsonl", [{"chosen": "x a", "rejected": "x b"}])
    with pytest.raises(UserError, match="use --train_on=assistant"):
        prepare([str(source)], tmp_path / "out", Options(train_on="all"))


def test_opening_notices_a_tokenizer_that_learns_other_tokens(tmp_path, monkeypatch):
    made = prepare([str(write(tmp_path / "a.jsonl", talks(9)))], tmp_path / "out", Options(eval_fraction=0))
    open_corpus(made.path)
    from jaxtrain.data.tokenizers.special_tokens import Specials

    whole = Specials.encode
    monkeypatch.setattr(Specials, "encode", lambda self, texts: [
        (ids, np.maximum(starts - 1, 0), np.maximum(stops - 1, 0)) for ids, starts, stops in whole(self, texts)])
    with pytest.raises(UserError, match="gives other ids than when it was prepared"):
        open_corpus(made.path)


# ---------------------------------------------------------------------------------------------------------------- rows

@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_weights_are_the_targets_own_also_where_documents_are_cut(tmp_path, packing):
    made = prepare([str(write(tmp_path / "a.jsonl", talks(60)))], tmp_path / "out", Options(eval_fraction=0))
    want = documents(made.train)
    T, lengths = 32, [len(one) for one in want]
    config = DataConfig(source=str(made.path), seq_len=T, packing=packing, cache_dir=str(tmp_path / "cache"))
    found = rows(config, made, "train")
    assert max(lengths) > 2 * T and min(lengths) < T
    flags = np.array([flag for one in want for _, flag in one])
    learnt = 0
    for row in (found[i] for i in range(len(found))):
        learnt += int(row["weights"].sum())
        assert (row["weights"][row["segments"] == 0] == 0).all()
        for target, weight in zip(row["targets"], row["weights"], strict=True):
            assert target != 256 or weight in (0, 1)
        assert row["weights"][row["targets"] == 256].any() or 256 not in row["targets"][row["segments"] > 0]
    total = int(flags.sum())
    assert learnt == total if packing == "best_fit" else total - T <= learnt <= total


def test_the_end_that_pads_has_no_loss_and_the_end_of_a_turn_has(tmp_path):
    """The last row is filled with the very id that the last conversation ends with."""
    made = prepare([str(write(tmp_path / "a.jsonl", [{"messages": [ASKED, SAID]}]))], tmp_path / "out",
                   Options(eval_fraction=0))
    row = PackedRows(made.train, 64, pad_last=True)[0]
    text = b"user: q\nassistant: a"
    assert row["targets"].tolist() == [*text[1:], *[256] * (65 - len(text))]
    assert np.flatnonzero(row["weights"]).tolist() == [len(text) - 2, len(text) - 1]


def test_inspect_shows_what_is_learnt(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    talk = [ASKED, SAID, {"role": "user", "content": "more " * 20}, {"role": "assistant", "content": "wörd"}]
    prepare([str(write(tmp_path / "a.jsonl", [{"messages": [ASKED, SAID]}, {"messages": talk}]))], tmp_path / "out",
            Options(eval_fraction=0))
    keys = ["--config=configs/gpt.py:tiny", f"--config.data.source={tmp_path / 'out'}",
            "--config.data.global_batch_size=4", "--config.data.packing=best_fit"]
    assert inspect(keys) == 0
    shown = capsys.readouterr().out
    assert "    user: q\n    assistant: ‹a<|endoftext|>›\n" in shown and "‹wörd<|endoftext|>›" in shown
    assert "cut: 1 of 2 conversations, longer than data.seq_len=64\n" in shown
    assert inspect([*keys[:-1], "--config.data.packing=concat"]) == 0
    assert "data.packing=best_fit would cut 1 of 2" in capsys.readouterr().out
    assert inspect([*keys, "--colour=always"]) == 0
    shown = capsys.readouterr().out
    assert "\033[38;5;240muser: q\n    assistant: \033[38;5;157ma<|endoftext|>\033[0m" in shown and "‹" not in shown


@pytest.mark.slow
def test_the_loss_is_that_of_the_assistants_tokens_and_no_others(tmp_path):
    """A step from prepared data is compared with the model's own logits and the records, read again by hand."""
    made = prepare([str(EXAMPLES / "conversations.jsonl")], tmp_path / "out", Options(eval_fraction=0))
    config = jt.load_config("configs/gpt.py:tiny", {
        "data.source": str(made.path), "data.packing": "best_fit", "data.seq_len": 256, "model.max_seq_len": 256,
        "data.global_batch_size": 4, "data.cache_dir": str(tmp_path / "cache"), "mesh.data": 1,
        "train.precision": "float32"})
    run = jt.build(config, devices=jax.devices()[:1])
    state, batch = run.init(), jax.device_get(run.batch(0))
    model = run.module(state)
    records = [json.loads(line) for line in (EXAMPLES / "conversations.jsonl").read_text().splitlines()]
    known = {tuple(id for id, _ in document): [flag for _, flag in document] for record in records
             if not any("tool_calls" in message for message in record["messages"])
             for document in [plain(record["messages"])]}
    terms, matched = [], 0
    for b in range(4):
        for segment in range(1, batch["segments"][b].max() + 1):
            where = np.flatnonzero(batch["segments"][b] == segment)
            ids = (*batch["tokens"][b][where].tolist(), int(batch["targets"][b][where[-1]]))
            flags = known.get(ids)
            if flags is None:  # the one with a tool
                assert "add" in made.tokenizer.decode(ids)
                flags = [False, *(batch["weights"][b][where] > 0)]
            else:
                matched += 1
            alone = np.pad(ids, (0, 257 - len(ids)))[None, :256]  # each conversation by itself, at the row's beginning
            logits = np.asarray(model(alone), np.float64)[0]
            chances = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            terms += [-chances[at, target] for at, (target, flag) in enumerate(zip(ids[1:], flags[1:], strict=True))
                      if flag]
    assert matched > 5
    _, metrics = run.step(state, run.batch(0))
    assert math.isclose(float(metrics["loss"]), np.mean(terms), rel_tol=1e-5)


def test_a_tokenizer_of_ones_own_with_the_tokens_of_a_template(tmp_path, capsys):
    source, path = EXAMPLES / "conversations.jsonl", tmp_path / "tokenizer.json"
    assert train_tokenizer([f"--input={source}", f"--output={path}", "--vocab_size=400", "--special_tokens",
                            "<|im_start|>", "<|im_end|>"]) == 0
    options = Options(tokenizer=str(path), chat_template="chatml", eval_fraction=0)
    made = prepare([str(source)], tmp_path / "out", options)
    begin, end = (made.tokenizer.specials[text] for text in ("<|im_start|>", "<|im_end|>"))
    ids = made.train.read(0, made.train.num_tokens)
    messages = [message for line in source.read_text().splitlines() for message in json.loads(line)["messages"]]
    assert "<|im_end|>" in "".join(message["content"] for message in messages)
    assert (ids == begin).sum() == (ids == end).sum() == len(messages)
    learnt = made.train.trained(0, len(ids))
    assert learnt[ids == end].sum() == sum(message["role"] == "assistant" for message in messages)
    assert not learnt[ids == begin].any() and not learnt[ids == made.tokenizer.eod].any()
    assert "The part of an array that one device holds.<|im_end|>" in made.tokenizer.decode(ids[learnt], specials=True)


def test_examples_of_preferences_are_what_they_say(tmp_path):
    made = prepare([str(EXAMPLES / "preferences.jsonl")], tmp_path / "out", Options(eval_fraction=0))
    first, second = (bytes(id for id, _ in one[:-1]).decode() for one in documents(made.train)[:2])
    assert (first, second) == ("user: Say hello.\nassistant: Hello!", "user: Say hello.\nassistant: No.")


@pytest.mark.slow
def test_a_command_line_prepares_and_another_one_trains(tmp_path):
    assert main([f"--input={EXAMPLES / 'conversations.jsonl'}", f"--output={tmp_path / 'corpus'}",
                 "--eval_fraction=0.3", "--workers=1"]) == 0
    with devices(1):
        assert train([f"--config={ROOT}/configs/gpt.py:tiny", f"--config.data.source={tmp_path / 'corpus'}",
                      "--config.model.num_layers=1", "--config.data.packing=best_fit", "--config.train.steps=3",
                      "--config.optimizer.warmup_steps=1", "--config.train.eval_every=2",
                      "--config.data.global_batch_size=8", f"--workdir={tmp_path / 'run'}"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses, evals = ([line[key] for line in lines if key in line] for key in ("loss", "eval_loss"))
    assert len(losses) == 3 and losses[2] < losses[0] and evals and "eval_bits_per_byte" not in str(lines)

"""Steps that clean: what each removes and changes, to the document, and how that is counted and told."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxtrain.commands.prepare import main
from jaxtrain.data import open_corpus
from jaxtrain.data.cleaning.cleaning_steps import Steps
from jaxtrain.data.formats.inputs import Ids, Text
from jaxtrain.data.prepare import job
from jaxtrain.data.prepare.prepare import Options, prepare, prepare_part
from jaxtrain.errors import UserError

ROOT = Path(__file__).parents[3]
ENGLISH = ("It was the best of the days that we have had, and nobody who was there with us would want to be anywhere "
           "else. The children played by the river until the evening came. ")
GERMAN = "Das ist ein Satz, den jeder versteht, und noch einer steht gleich dahinter, damit es reicht. "


def jsonl(path: Path, *records) -> str:
    rows = [record if isinstance(record, dict) else {"text": record} for record in records]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def apply(name: str, text: str, **record) -> Text | str:
    return Steps([name])(Text("a", text.encode(), record=record))


def texts(corpus) -> list[str]:
    ids = corpus.train.read(0, corpus.train.num_tokens)
    return bytes(int(i) if i < 256 else 0 for i in ids).decode().split("\0")[:-1]


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def manifest(corpus) -> dict:
    return json.loads((corpus.path / "manifest.json").read_text())


# ---------------------------------------------------------------------------------------------------- what steps do

@pytest.mark.parametrize(("text", "reason"), [
    (ENGLISH * 3, None),
    ("the word of one and that", "fewer than 50 words"),
    ("the of " * 50_001, "more than 100,000 words"),
    ("the of a I " * 40, "words of unusual length"),
    ((ENGLISH + "# " * 12) * 3, "many hashes or ellipses"),
    ("\n".join(f"- the state of number {word}" for word in "abcdefghijklm"), "nearly all lines are bullet points"),
    ("\n".join(f"the river of many {word} then..." for word in "abcdefghijk") + "\n" + ENGLISH * 3,
     "many lines end in an ellipsis"),
    ("the sum of 1234 5678 " * 20, "many words without a letter"),
    (GERMAN * 5, "no English stop words"),
    ("this line of the page comes again\n" * 20, "many repeated lines"),
])
def test_quality_follows_gopher(text, reason):
    result = apply("quality", text)
    assert result == (f"quality: {reason}" if reason else Text("a", text.encode()))
    if reason == "no English stop words":
        assert apply("quality=any", text).content == text.encode()


@pytest.mark.parametrize(("before", "after"), [
    ("write to jo.doe+x@mail.example.org, soon", "write to email@example.com, soon"),
    ("x@y.de", "email@example.com"),
    ("8.8.8.8 and 2a00:1450:4001:81b::200e.", "192.0.2.1 and 2001:db8::1."),
    ("+49 30 123456-78 or (212) 555-1234, 212-555-1234", "+1 202 555 0100 or +1 202 555 0100, +1 202 555 0100"),
    ("10.0.0.1 127.0.0.1 1.2.3.4.5 v1.2.3.4 300.1.1.1 x[1::2] 12:30:45", None),
    ("2024-01-02 123-456-78901 3.14159265 +100 x+1000000000 @decorator a@b", None),
    ("+1 202 555 0100 email@example.com 192.0.2.1", None),
])
def test_pii_is_replaced_and_what_only_looks_like_it_is_not(before, after):
    assert apply("pii", before).content.decode() == (after or before)


def test_languages_are_told_apart():
    french = "Ceci est une phrase en français, et en voici encore une autre plus longue."
    kept = [isinstance(apply("language=en,de", text), Text) for text in (ENGLISH, GERMAN, french)]
    assert kept == [True, True, False]
    assert apply("language=en", GERMAN) == "language=en: is de"


def test_licences_and_lists(tmp_path):
    (tmp_path / "list.txt").write_text("# a comment\nforbidden\nTwo  Words\nhost:bad.example\n")
    block = f"blocklist={tmp_path}/list.txt"
    assert apply(block, "This is Forbidden!") == "blocklist=list.txt: a listed word"
    assert apply(block, "These two\nwords here") == "blocklist=list.txt: a listed phrase"
    assert apply(block, "x", url="https://www.bad.example/x") == "blocklist=list.txt: a listed host"
    for text, url in (("unforbidden, words two", ""), ("two kinds of words", "https://notbad.example/"), ("# a", "%%")):
        assert isinstance(apply(block, text, url=url), Text)
    assert isinstance(apply("licence=MIT,apache-2.0", "x", license="mit"), Text)
    assert isinstance(apply("licence=mit,apache-2.0", "x", licences=["Apache-2.0", "MIT"]), Text)
    assert apply("licence=mit", "x", license="gpl-3.0") == "licence=mit: licence gpl-3.0"
    assert apply("licence=mit", "x", license=["mit", "gpl-3.0"]) == "licence=mit: licence gpl-3.0"
    assert apply("licence=mit", "x") == "licence=mit: no licence"


@pytest.mark.slow
def test_datatroves_filters_and_formatters_by_name():
    assert apply("datatrove:RegexFilter(regex_exp='forbidden')", "is forbidden").endswith(": filtered")
    assert apply("datatrove:SymbolLinesFormatter(symbols_to_remove=['|'])", "x\n|\ny").content == b"x\ny"
    assert apply("datatrove:C4ParagraphFilter", "short") == "datatrove:C4ParagraphFilter: < 3 paragraphs"
    assert b"@example." in apply("datatrove:PIIFormatter", "jo@doe.org").content


# ---------------------------------------------------------------------------------------------- in a row, and counted

RNG = random.Random(0)
RECORDS = [{"text": " ".join([str(i), *RNG.sample(ENGLISH.split() * 2, 60), *["jo@doe.org"] * (i % 4 == 0)]),
            "license": "mit" if i % 3 else "gpl"} for i in range(60)]
RECORDS += [{"text": "short", "license": "mit"}, {"text": ""}]
STEPS = ("licence=mit", "quality", "pii")


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_each_step_counts_what_it_saw_removed_and_changed(tmp_path, form):
    source = jsonl(tmp_path / "a.jsonl", *RECORDS)
    if form == "parquet":
        parquet.write_table(pa.Table.from_pylist(RECORDS), source := str(tmp_path / "a.parquet"), row_group_size=20)
    corpus = prepare([source], tmp_path / "out", Options(eval_fraction=0, steps=STEPS, licence_of="record:license"))
    assert texts(corpus) == [row["text"].replace("jo@doe.org", "email@example.com")
                             for i, row in enumerate(RECORDS[:60]) if i % 3]
    made = manifest(corpus)
    assert made["steps"] == [
        {"step": "licence=mit", "seen": 61, "changed": 0, "removed": {"licence gpl": 20}},
        {"step": "quality", "seen": 41, "changed": 0, "removed": {"fewer than 50 words": 1}},
        {"step": "pii", "seen": 40, "changed": 10, "removed": {}}]
    assert made["left_out"] == {"licence=mit: licence gpl": 20, "quality: fewer than 50 words": 1, "empty": 1}
    assert made["licences"] == {"mit": 40}


def test_removal_of_duplicates_sees_cleaned_text(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", "from a@b.org", "other", "from c@d.org", "other")
    corpus = prepare([source], tmp_path / "out", Options(eval_fraction=0, steps=("pii",), deduplicate=True))
    assert texts(corpus) == ["from email@example.com", "other"]
    assert manifest(corpus)["steps"] == [
        {"step": "pii", "seen": 4, "changed": 2, "removed": {}},
        {"step": "deduplicate=exact", "seen": 4, "changed": 0, "removed": {"equal to another": 2}}]


@pytest.mark.slow
def test_any_number_of_workers_writes_the_same_bytes(tmp_path):
    """Even with a step that keeps something in mind: datatrove's goes through its replacements in turn."""
    source = jsonl(tmp_path / "a.jsonl", *RECORDS, *RECORDS)
    options = Options(task_bytes=4000, steps=("quality", "datatrove:PIIFormatter"), deduplicate="near")
    one, three = (prepare([source], tmp_path / str(workers), options, workers) for workers in (1, 3))
    assert tree(one.path) == tree(three.path) and len(one.train.shards) > 3


@pytest.mark.parametrize("kills", [
    pytest.param(3, marks=pytest.mark.slow), pytest.param(30, marks=pytest.mark.exhaustive)])
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path, kills):
    source, rng = jsonl(tmp_path / "a.jsonl", *RECORDS * 60), random.Random(kills)
    flags = ["--task_bytes=60000", "--workers=2", "--deduplicate=near", "--filters", *STEPS]
    command = [sys.executable, "-m", "jaxtrain", "prepare", f"--input={source}", *flags]
    want = prepare([source], tmp_path / "want", Options(task_bytes=60000, deduplicate="near", steps=STEPS))
    killed = rounds = 0
    while killed < kills:
        output = tmp_path / f"out{rounds}"
        process = subprocess.Popen([*command, f"--output={output}"], env=os.environ | {"PYTHONPATH": str(ROOT)},
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        time.sleep(rng.uniform(0.3, 1.3))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            killed += 1
        process.wait()
        rounds += (output / "manifest.json").exists()  # it was too fast for us: another one
    for number in range(rounds + 1):
        output = tmp_path / f"out{number}"
        assert main([*command[4:], f"--output={output}"]) == 0
        assert tree(output) == tree(want.path)


# ------------------------------------------------------------------------------------------------------- one's own

@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Writes a module `own_steps` and makes it importable."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(code: str) -> None:
        (tmp_path / "own_steps.py").write_text(code)
        sys.modules.pop("own_steps", None)

    yield write
    sys.modules.pop("own_steps", None)


PLUGIN = """
from dataclasses import replace
def upper(document): return replace(document, content=document.content.upper())
def shorter(length): return lambda document: document if len(document.content) < int(length) else "too long"
class Counter:
    def __init__(self): self.seen = 0
    def __call__(self, document):
        self.seen += 1
        return document if self.seen % 2 else "every other"
def broken(document): return 1 / 0 if b"3" in document.content else document
def nothing(document): return None if b"1" in document.content else document
def string(document): return replace(document, content="text")
def cut(document): return replace(document, content="é".encode()[:1])
"""


def test_a_function_a_factory_and_a_class_are_steps(tmp_path, plugin):
    plugin(PLUGIN)
    source = jsonl(tmp_path / "a.jsonl", "a1", "a2", "a-long-one", "a4", "a5")
    steps = ("own_steps:upper", "own_steps:shorter=5", "own_steps:Counter")
    corpus = prepare([source], tmp_path / "out", Options(eval_fraction=0, steps=steps))
    assert texts(corpus) == ["A1", "A4"]
    assert manifest(corpus)["left_out"] == {"own_steps:shorter=5: too long": 1, "own_steps:Counter: every other": 2}


def test_steps_run_once_and_again_where_the_input_changed(tmp_path, plugin):
    plugin(f"""
def step(document):
    with open({str(tmp_path / 'calls')!r}, "a") as file: file.write(document.content.decode() + " ")
    return document
""")
    (tmp_path / "in").mkdir()
    for i in range(3):
        jsonl(tmp_path / f"in/{i}.jsonl", f"a{i}", "same")
    options = Options(eval_fraction=0, steps=("own_steps:step",), deduplicate="exact", task_bytes=34)
    for stage in ("duplicates", "tokens"):  # all but the manifest
        prepare_part([str(tmp_path / "in")], tmp_path / "out", options, stage=stage)
    assert (tmp_path / "calls").read_text() == "a0 same a1 same a2 same "
    jsonl(tmp_path / "in/1.jsonl", "b1", "same")
    corpus = prepare([str(tmp_path / "in")], tmp_path / "out", options)
    assert texts(corpus) == ["a0", "same", "b1", "a2"]
    assert (tmp_path / "calls").read_text() == "a0 same a1 same a2 same b1 same "
    assert manifest(corpus)["steps"] == [
        {"step": "own_steps:step", "seen": 6, "changed": 0, "removed": {}},
        {"step": "deduplicate=exact", "seen": 6, "changed": 0, "removed": {"equal to another": 2}}]


def test_a_change_of_a_step_or_of_its_file_is_noticed(tmp_path, plugin):
    plugin(PLUGIN)
    source, listed = jsonl(tmp_path / "a.jsonl", "one", "two"), tmp_path / "list.txt"
    listed.write_text("two")
    options = Options(eval_fraction=0, steps=("own_steps:upper", f"blocklist={listed}"))
    assert texts(prepare([source], tmp_path / "out", options)) == ["ONE"]
    assert open_corpus(tmp_path / "out").manifest_hash == prepare([source], tmp_path / "out", options).manifest_hash
    for change in (lambda: listed.write_text("one"), lambda: (listed.write_text("two"), plugin(PLUGIN + "#"))):
        change()
        with pytest.raises(UserError, match="holds another corpus"):
            prepare([source], tmp_path / "out", options)


@pytest.mark.parametrize(("at", "deduplicate"), [
    ("tokens: 2 of", True), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("", False), ("", True), ("tokens: 2 of", False), ("duplicates: 2 of", True)))])
def test_a_list_that_changes_meanwhile_is_noticed(tmp_path, monkeypatch, at, deduplicate):
    source, listed = jsonl(tmp_path / "a.jsonl", "one", "two", "six"), tmp_path / "list.txt"
    listed.write_text("nothing")

    def edit(line):
        if at and line.startswith(at):
            listed.write_text("two")

    options = Options(eval_fraction=0, steps=(f"blocklist={listed}",), deduplicate=deduplicate, task_bytes=1)
    if not at:
        begun = job.begun
        monkeypatch.setattr(job, "begun", lambda *rest: listed.write_text("two") and begun(*rest))
    with pytest.raises(UserError, match=r"--filters: its files differ between machines.* delete .* and run again"):
        prepare([source], tmp_path / "out", options, say=edit)


def test_a_plugin_that_was_edited_is_imported_again(tmp_path, plugin):
    plugin("def step(document): return document")
    source, options = jsonl(tmp_path / "a.jsonl", "one"), Options(eval_fraction=0, steps=("own_steps:step",))
    assert texts(prepare([source], tmp_path / "out", options)) == ["one"]
    (tmp_path / "own_steps.py").write_text("def step(document): return 'not any more'")
    with pytest.raises(UserError, match=r"own_steps:step: not any more"):
        prepare([source], tmp_path / "other", options)


def test_the_example_leaves_out_keys(tmp_path):
    key = "-----BEGIN RSA PRIVATE KEY-----"
    source = jsonl(tmp_path / "a.jsonl", "fine", f"here: {key}", "AKIA" + "A1B2" * 4)
    corpus = prepare([source], tmp_path / "out", Options(eval_fraction=0, steps=("examples.leave_out_secrets:step",)))
    assert texts(corpus) == ["fine"]
    assert manifest(corpus)["left_out"] == {"examples.leave_out_secrets:step: a private key or token": 2}


# -------------------------------------------------------------------------------------------------- what is refused

@pytest.mark.parametrize(("flags", "words"), [
    (["--filters", "qality"], "--filters: there is no step 'qality'; did you mean 'quality'?"),
    (["--filters", "language"], "--filters: language cannot be made"),
    (["--filters", "language=xx"], "language=xx is not a language that py3langid knows; known: ace, af,"),
    (["--filters", "quality=fr"], "quality=fr is not known"),
    (["--filters", "blocklist=none.txt"], "the blocklist none.txt cannot be read"),
    (["--filters", "no_such_module:step"], "no_such_module:step cannot be imported"),
    (["--filters", "own_steps:none"], "own_steps:none cannot be imported"),
    (["--filters", "own_steps:broken"], "own_steps:broken failed on a.jsonl, line 3 (ZeroDivisionError: division"),
    (["--workers=2", "--filters", "own_steps:broken"], "own_steps:broken failed on a.jsonl, line 3 (Zero"),
    (["--filters", "own_steps:nothing"], "own_steps:nothing gave None for a.jsonl, line 1"),
    (["--filters", "own_steps:string"], "own_steps:string gave 'text' as the content of a.jsonl, line 1"),
    (["--filters", "own_steps:cut", "--deduplicate"], r"own_steps:cut gave b'\xc3' as the content of a.jsonl, line 1"),
    (["--deduplicate=fuzzy"], "invalid choice: 'fuzzy'"),
    (["--deduplicate=near", "--near_threshold=2"], "--near_threshold: 2.0 is not between"),
    (["--describe", "nonsense"], "--describe: 'nonsense' is not KEY=VALUE"),
    (["--describe", "desciption=x"], "has no field 'desciption'; did you mean 'description'?"),
    (["--describe", "date_published=soon"], "date_published=soon is not a date"),
    (["--sample=3"], "--sample: 3 has no use here"),
    *(pytest.param(["--filters", f"datatrove:{call}"], words, marks=pytest.mark.slow) for call, words in (
        ("Nonsense", "datatrove has no filter or formatter 'Nonsense'"),
        ("RegexFilter(1)", "datatrove:RegexFilter(1) cannot be parsed"),
        ("RegexFilter(pattern='x')", "RegexFilter(pattern='x') cannot be made (TypeError"))),
])
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, plugin, flags, words):
    plugin(PLUGIN)
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "a.jsonl", "1", "2", "3", "4")
    assert main(["--input=a.jsonl", "--output=out", "--task_bytes=30", "--workers=1", *flags]) == 2
    *before, mistake = capsys.readouterr().err.splitlines()
    assert words in mistake and all("MB/s" in line for line in before)  # of another worker, which was done


def test_tokens_cannot_be_cleaned():
    with pytest.raises(UserError, match="x is already tokenised"):
        Steps(["pii"])(Ids("x", np.arange(3)))


@pytest.mark.slow
def test_a_step_that_leaves_nothing_removes():
    assert Steps(["datatrove:SymbolLinesFormatter(symbols_to_remove=['|'])"])(Text("a", b"|")) == (
        "datatrove:SymbolLinesFormatter(symbols_to_remove=['|']): empty after the step")

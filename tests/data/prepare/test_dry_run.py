"""A dry run: what each step would do, to the number, with examples; and nothing is written."""

import json
import random

from jaxtrain.commands.prepare import main


def test_a_dry_run_reports_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    long = " ".join(f"word{i}" for i in range(100))
    texts = ["keep one", "from jo@doe.org here", "forbidden " + "x" * 200, "keep one", "", long, long + " end",
             *[f"forbidden {i}" for i in range(5)]]
    (tmp_path / "list.txt").write_text("forbidden")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    before = sorted(tmp_path.rglob("*"))
    flags = ["--input=a.jsonl", "--dry_run", "--deduplicate=near", "--filters", "pii", "blocklist=list.txt"]
    assert main(flags) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 dropped: empty",
        "pii: of 11 documents 0 dropped, 1 changed",
        "  a.jsonl, line 2: 'from jo@doe.org here' -> 'from email@example.com here'",
        "blocklist=list.txt: of 11 documents 6 dropped, 0 changed",
        "    6 a listed word",
        f"  a.jsonl, line 3: a listed word: 'forbidden {'x' * 90}'",
        "  a.jsonl, line 8: a listed word: 'forbidden 0'",
        "  a.jsonl, line 9: a listed word: 'forbidden 1'",
        "deduplicate=near: of 5 documents 2 dropped, 0 changed",
        "    1 equal to another",
        "    1 nearly equal to another",
        "  a.jsonl, line 4 is like a.jsonl, line 1: 'keep one'",
        f"  a.jsonl, line 7 is like a.jsonl, line 6: {long[:100]!r}",
        "nothing was written"]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_sample_comes_from_all_over(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"a{i}@doe.org"}) + "\n" for i in range(1000)))
    for sample, tasks in ((10, 3000), (3, 3000), (10, 10**6)):
        assert main([f"--input={tmp_path}/a.jsonl", "--dry_run", f"--sample={sample}", f"--task_bytes={tasks}",
                     "--filters", "pii"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"pii: of {sample} documents 0 dropped, {sample} changed"
        assert ("'a2@doe.org'" in lines[3]) == (tasks == 10**6)


def test_counts_are_those_of_prepare(tmp_path, capsys):
    """Counts agree even where documents that are not alike share a band, and equal ones are among them."""
    rng = random.Random(0)
    texts = [" ".join(rng.choices("abcdefghij", k=12)) for _ in range(200)]
    texts += rng.choices(texts, k=100)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    flags = [f"--input={tmp_path / 'a.jsonl'}", "--deduplicate=near", "--near_threshold=0.3", "--near_permutations=16",
             "--near_shingle=2", "--task_bytes=3000"]
    assert main([*flags, "--dry_run"]) == 0
    said = capsys.readouterr().out
    assert main([*flags, "--workers=1", f"--output={tmp_path / 'out'}"]) == 0
    step, = json.loads((tmp_path / "out/manifest.json").read_text())["steps"]
    assert min(step["removed"].values()) > 20
    assert all(f"    {count:,} {reason}\n" in said for reason, count in step["removed"].items())


def test_what_the_template_leaves_out_is_told(tmp_path, capsys):
    talks = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": said}] for said in ("a", "", "b")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    assert main([f"--input={tmp_path / 'a.jsonl'}", "--dry_run", "--deduplicate"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 dropped: no turn to learn", "deduplicate=exact: of 2 documents 0 dropped, 0 changed",
        "nothing was written"]

"""The command that lets islands meet: what it prints, and its mistakes in one sentence."""

import hashlib
import json
import re

import pytest

from jaxtrain.commands.diloco import main
from jaxtrain.diloco.coordinator import Policy
from jaxtrain.diloco.meeting import Offer
from jaxtrain.diloco.outer_log import OuterLog


def test_status_shows_a_log(tmp_path, capsys):
    log = OuterLog(tmp_path, Policy(islands=2))
    for base, last in ((0, False), (1, True)):
        for island in range(2):
            content = b"%d" % island
            log.offer(Offer(island, base, 0, 1.0, hashlib.sha256(content).hexdigest(), 10, 2000, last and island == 1),
                      content)
    log.offer(Offer(0, 2, 0, 1.0, hashlib.sha256(b"").hexdigest()), b"")
    log.close()
    assert main(["status", f"{tmp_path}"]) == 0
    first, *table = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"3 entries, the last \d s ago", first), first
    assert [re.split("  +", line) for line in table] == [
        ["island", "entries", "steps", "tokens", "refused", "last entry"], ["0", "3", "20", "4,000", "0", "3"],
        ["1", "2", "20", "4,000", "0", "2 (left)"]]
    assert main(["status", f"{tmp_path}", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["entries"], said["open"]) == (3, []) and said["islands"][1] == {
        "island": 1, "entries": 2, "steps": 20, "tokens": 4000, "refused": 0, "last_entry": 2, "left": True}


@pytest.mark.parametrize(("words", "told"), [
    (["serve", "--workdir=log"], "diloco serve: islands cannot reach it; give --address"),
    (["serve", "--workdir=log", "--address=127.0.0.1:0"], "--keys: it is missing; make certificates by"),
    (["serve", "--workdir=log", "--address=127.0.0.1:0", "--keys=none"], "--keys: none/ca.pem is not there; make"),
    (["serve", "--workdir=log", "--store=s", "--quorum=3"], "--quorum: 3 is not between 1 and --islands=1"),
    (["serve", "--workdir=log", "--store=s", "--lease=-1"], "--lease: it is negative"),
    (["status", "none"], "WORKDIR: none has no log of islands"),
    (["keys", "--output=keys", "--islands=0"], "diloco keys: --islands and --days are numbers from 1 on"),
])
def test_mistakes_are_one_sentence(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(told)
    assert not list(tmp_path.iterdir())

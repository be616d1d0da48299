"""The card of a model says what the records of its run say, and of what is missing that it is."""

import json

import pytest

from jaxtrain.commands import prepare
from jaxtrain.hub.release import model_card

MODEL = {"name": "llama", "num_layers": 2, "embed_dim": 64, "vocab_size": 32000, "max_seq_len": 4096}
RECORD = {"workdir": "run", "step": 20, "parameters": "abcd"}


@pytest.fixture
def workdir(tmp_path):
    """A run's records, and a corpus whose manifest tells licence and name."""
    (tmp_path / "text.txt").write_text("It was the best of times.\n" * 50)
    assert prepare.main([f"--input={tmp_path / 'text.txt'}", f"--output={tmp_path / 'corpus'}", "--licence_of=CC0-1.0",
                         "--describe", "name=Tale", "url=https://example.org/a|b"]) == 0
    run = {"mesh": {"data": 1, "fsdp": 8}, "device_kind": "TPU v5p", "config_hash": "c0ffee", "git_commit": "fade",
           "init_from": {"folder": "/secret/place/base-7b", "sha256": {}},
           "proof": {"code": "f00d", "config": "beef", "layouts": 20, "steps": 3, "worst": 0.231}}
    (folder := tmp_path / "work").mkdir()
    (folder / "run.json").write_text(json.dumps(run))
    lines = [{"step": 20, "tokens": 5120, "loss": 2.0}, {"step": 20, "eval_loss": 1.25}, {"step": 30, "tokens": 7680},
             {"step": 10, "eval_loss": 9.0}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "evaluations").mkdir()
    (folder / "evaluations" / "20.json").write_text(json.dumps({"results": {"arc": {
        "alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.1}}}))
    return folder


def test_it_says_what_the_records_say(workdir):
    sections = {"model": MODEL, "data": {"source": str(workdir.parent / "corpus"), "seq_len": 64},
                "train": {"steps": 30, "init_from": "/secret/place/base-7b"}}
    gates = {"releasable": True, "share": 0.9, "suites": {"refusals": {"passed": 9, "checks": 10}}}
    text = model_card.card(workdir, sections, "tale-7b", "apache-2.0", RECORD | {"gates": gates}, True)
    head, body = text.split("---\n")[1:]
    assert {line.partition(": ")[0]: json.loads(line.partition(": ")[2]) for line in head.splitlines()
            if line.startswith(("license", "base_model", "datasets"))} == {
        "license": "apache-2.0", "base_model": "base-7b", "datasets": ["Tale"]}
    for part in ("# tale-7b\n", "weights of step 20, begun with base-7b.", "| tokens | 5,120 |", "| mesh | fsdp 8 |",
                 "| Tale | ", "| CC0-1.0 |", "https://example.org/a\\|b", "| held-out text | loss | 1.2500 |",
                 "| arc | acc | 0.5000 |", "90% had to pass: passed.", "| refusals | 9 of 10 |",
                 "| proof | On 20 layouts of devices, 3 steps have the numbers of one device (worst error 0.23 of the "
                 "tolerance; jaxtrain prove, code f00d, config beef) |",
                 "AutoTokenizer.from_pretrained", '"steps": 30'):
        assert part in body, part
    assert "/secret" not in text and "9.0" not in text and "stderr" not in text and str(workdir.parent) not in text


def test_an_average_a_reward_model_and_a_mixture_are_told_as_such(workdir):
    """An evaluation that was not finite is left out of the card, too."""
    line = {"step": 20, "eval_loss": None, "eval_perplexity": 3.5, "eval_loss_ema": 1.125}
    (workdir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (workdir / "evaluations" / "20-ema.json").write_text(json.dumps({"results": {"arc": {"acc,none": 0.75}}}))
    mixture = {"tales": {"source": str(workdir.parent / "corpus"), "weight": 2}, str(workdir.parent / "gone"): {}}
    sections = {"model": MODEL, "data": {"mixture": mixture}, "preference": {"loss": "reward"}}
    text = model_card.card(workdir, sections, "judge", "", RECORD | {"averaged": True}, True)
    for part in ("pipeline_tag: text-classification", "A llama reward model", "the moving average of the weights of st",
                 "| held-out text | loss_ema | 1.1250 |", "| arc | acc | 0.7500 |", "| Tale | "):
        assert part in text, part
    assert "perplexity" not in text and "0.5000" not in text
    plain = model_card.card(workdir, sections, "judge", "", RECORD, True)
    assert "loss_ema |" not in plain and "perplexity | 3.5000" in plain and "| arc | acc | 0.5000 |" in plain


def test_what_no_record_has_is_said_to_be_missing(tmp_path):
    text = model_card.card(tmp_path, {"model": MODEL, "data": {"source": "stdlib"}}, "m", "", RECORD, True)
    for part in ("No licence is stated.", "No manifest of the data is here.", "This step was not evaluated.",
                 "No gates were set: whether the model is safe to use was not tested."):
        assert part in text, part
    assert "license:" not in text and "datasets:" not in text


def test_a_model_that_is_not_to_be_released_says_so(tmp_path):
    gates = {"releasable": False, "share": 1.0, "suites": {"refusals": {"passed": 0, "checks": 1}}}
    text = model_card.card(tmp_path, {"model": MODEL}, "m", "", RECORD | {"gates": gates}, True)
    assert "**not passed**: this model is not to be released" in text

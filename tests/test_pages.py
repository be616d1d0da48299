"""Promises of the documentation's pages: search finds the field's words, names of keys and commands exist, and a page
says when its code was executed."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from jaxtrain.commands import COMMANDS
from tools.release import executed_pages

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
STEPS = re.findall(r"^\| \d \| \[.*?\]\((start-.*?\.md)\)", (ROOT / "docs/index.md").read_text(), re.M)

# What somebody types into a search box: each has to stand where the search ranks it first.
WORDS = """
gradient accumulation; FSDP; ZeRO; HSDP; tensor parallelism; pipeline parallelism; context parallelism; expert
parallelism; mesh; activation checkpointing; rematerialization; mixed precision; FP8; MXFP8; NVFP4; learning
rate schedule; Muon; muP; scaling law; LoRA; QLoRA; DoRA; DPO; KTO; GRPO; PPO; reward model; RLHF;
reinforcement learning; supervised fine-tuning; SFT; chat template; preference; distillation; mixture of
experts; MoE; throughput; MFU; profiling; perplexity; evaluation; lm-evaluation-harness; data loader; packing;
deduplication; tokenizer; checkpoint; resume; fault tolerance; elastic; hang; loss spike; silent data
corruption; SDC; goodput; Slurm; Kubernetes; Ray; TensorBoard; Weights & Biases; MLflow; Prometheus; Grafana;
OpenTelemetry; Hugging Face; safetensors; GGUF; vLLM; Whisper; CLIP; SigLIP; hyperparameter; DiLoCo; ahead of
time; out of memory; learning rate; generation; quantization; GPU; TPU; MaxText; Levanter; torchtitan; TRL;
DeepSpeed
"""
WORDS = [word.strip() for word in WORDS.replace("\n", " ").split(";")]


def easily_found(text: str) -> str:
    """Return the headings of a page and the paragraph that follows each: what a search ranks first, and shows."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    parts = re.split(r"^(#+ .*)$", text, flags=re.M)
    return "\n".join(f"{heading}\n{body.strip().split(chr(10) * 2)[0]}"
                     for heading, body in zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("word", WORDS)
def test_search_finds_the_words_of_the_field(word):
    plain = re.compile(rf"\b{re.escape(word)}(?:s|es|ing)?\b", 0 if word.isupper() else re.I)
    assert any(plain.search(easily_found(page.read_text())) for page in PAGES), "put it into a heading or below one"


def test_the_ladder_has_six_steps_that_lead_on():
    assert len(STEPS) == 6
    for step, following in zip(STEPS, [*STEPS[1:], None], strict=True):
        text = (ROOT / "docs" / step).read_text()
        assert text.startswith(f"# {STEPS.index(step) + 1}. ") and len(text.splitlines()) < 80
        assert "en minutes" in text.split("\n## ")[0], "how long it takes stands at the top"
        assert following is None or f"]({following})" in text.partition("Next: [")[2]
        assert re.search(r"^```(bash|python)$", text, re.M), "a step is something to do"


def ours() -> list[str]:
    """Return the names in the last column of the tables for those who come from elsewhere."""
    rows = re.findall(r"^\| (?!what|---).* \| .* \| (.*) \|$", (ROOT / "docs/coming-from.md").read_text(), re.M)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def known_keys() -> dict[str, str]:
    """Return every key of a config, with its description."""
    text = (ROOT / "docs/keys.md").read_text()
    return dict(re.findall(r"^\| `([a-z_]+\.[a-z0-9_]+)` \| (.*) \|$", text, re.M))


def test_every_framework_has_a_table():
    text = (ROOT / "docs/coming-from.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.M) == ["MaxText", "Levanter", "torchtitan", "TRL", "DeepSpeed"]
    assert text.count("\nSource") == 5 and len(ours()) > 150


@pytest.mark.parametrize("name", sorted({*ours()}))
def test_what_we_say_that_we_call_it_exists(name):
    """A key, with its value; a command with its flags; a config; or words of the page itself."""
    keys = known_keys()
    if name.startswith("jaxtrain "):
        _, command, *flags = re.findall(r"[\w-]+", name.replace("--config.KEY=VALUE", ""))[:2] + re.findall(
            r"--[a-z_]+", name.replace("--config.KEY=VALUE", ""))
        source = (ROOT / f"jaxtrain/commands/{command}.py").read_text()
        source += (ROOT / "jaxtrain/commands/flags.py").read_text()
        assert command in COMMANDS and all(f'"{flag}"' in source for flag in flags)
    elif found := re.match(r"([a-z_]+\.[a-z0-9_]+)(?:=(\w+))?$", name):
        key, value = found.groups()
        assert key in keys
        assert not value or value.isupper() or re.search(rf"\b{value}\b", (ROOT / "docs/keys.md").read_text().split(
            f"`{key}`", 1)[1].split("\n| `", 1)[0]), "the key has no such value"
    elif name.startswith("configs/"):
        assert (ROOT / name.partition(":")[0]).is_file()
    else:
        assert name in ("--workdir", "--config=hf:FOLDER", "mesh=hsdp", "mesh=auto", "jt.build(config, devices=2048)",
                        "full", "dots", "auto", "best_fit", "mfu"), name


def test_a_page_says_when_its_code_was_executed():
    text = "# A page\n\nWords.\n\n```bash\njaxtrain top runs\n```\n"
    pages = {"docs/a.md": {"date": "2026-11-30", "commit": "abc", "python": "3.11.7", "jax": "0.10.2", "ran": 1,
                           "digest": executed_pages.digest(text)}}
    said = executed_pages.sentence("docs/a.md", text.replace("Words", "Other words"), pages)
    assert said == ("Tests executed commands and code of this page, some with fewer steps, on 2026-11-30 at commit "
                    "abc, with Python 3.11.7 and JAX 0.10.2 (1 in all).")
    changed = executed_pages.sentence("docs/a.md", text.replace("top runs", "top"), pages)
    assert changed == f"{said} They have changed since."
    assert "not recorded yet" in executed_pages.sentence("docs/b.md", text, pages)
    assert executed_pages.sentence("docs/b.md", "# Words", pages) == "This page has nothing to execute."


def test_pages_are_recorded_beside_those_that_were_before(tmp_path, monkeypatch):
    monkeypatch.setattr(executed_pages, "RECORD", tmp_path / "executed.json")
    (tmp_path / "executed.json").write_text(json.dumps({"docs/a.md": {"ran": 3}}))
    executed_pages.record({ROOT / "README.md": 7, ROOT / "docs/decisions.md": 0})
    assert set(pages := executed_pages.recorded()) == {"README.md", "docs/a.md"}
    assert pages["README.md"]["ran"] == 7 and re.fullmatch(r"20\d\d-\d\d-\d\d", pages["README.md"]["date"])


def test_a_page_counts_as_executed_once_all_of_it_was():
    from tests import test_readme

    page = ROOT / "docs/start-mesh.md"
    every = {*test_readme.shown_on(page), (page.name, 0), (page.name, 1)}
    assert test_readme.pages_of(every)[page] == len(every)
    assert all(page not in test_readme.pages_of(every - {one}) for one in every)


@pytest.mark.skipif(not importlib.util.find_spec("sphinx"), reason="needs pip install -e '.[docs]'")
def test_the_site_puts_that_below_a_page():
    import runpy
    from types import SimpleNamespace

    conf = runpy.run_path(str(ROOT / "docs/conf.py"))
    context = {"body": "<p>the page</p>"}
    conf["say_when_executed"](SimpleNamespace(srcdir=str(ROOT)), "docs/keys", "page.html", context, None)
    assert context["body"].startswith('<p>the page</p><p class="executed">')

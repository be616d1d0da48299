"""The memory of a device while a run answers prompts: counted by hand, and compared with the compiler's figures."""

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path

import jax
import pytest

import jaxtrain as jt
from jaxtrain.builder import build
from jaxtrain.plan import preflight, search, targets
from jaxtrain.plan.answering import DECODING, LAYING_OUT, PROMPTS, REWARDS, VALUES, memory_by_phase
from jaxtrain.plan.compiler import compile_answering
from jaxtrain.plan.cost.memory_parts import CACHE, COPY, LOGITS
from jaxtrain.plan.cost.time import Time
from jaxtrain.plan.estimate import Estimate, estimate
from jaxtrain.plan.report.answers_room import answers_at_once, room_for_answers
from jaxtrain.plan.report.table import explained
from jaxtrain.train_step.report import total
from tests.tiers import exhaustive, slow, slow_if
from tools.benchmarks import bench_plan

KEPT = {line["name"]: line["bytes"] for line in map(json.loads, bench_plan.ANSWERS_KEPT.read_text().splitlines())}
CASES = {case["name"]: case for case in bench_plan.ANSWERS}
# Rows of experts are counted before their sum, with which XLA fuses the gather of them.
LARGER = {("DeepSeek-V3 8 layers h200 {'fsdp': 8, 'expert': 8}", PROMPTS): 0.3}
GPT, GROUPED, WINDOWS, LATENT = ("gpt.py:tiny", "llama3_1b.py:tiny", "gemma3_1b.py:tiny", "deepseek_v3.py:tiny")


def learning(config, **keys):
    """A run of 32 answers of at most 24 tokens behind at most 40 of a prompt."""
    usual = {"mesh.fsdp": 1, "data.seq_len": 64, "data.global_batch_size": 32, "rl.max_new_tokens": 24,
             "train.accumulation": 1, **bench_plan.LEARNING}
    return jt.load_config(f"configs/{config}", usual | {key.replace("__", "."): value for key, value in keys.items()})


def of_cache(c, rows, tensor):
    """The bytes of the cache of a device, in bfloat16, with 64 slots of prompts and 32 of answers."""
    heads = max(1, c.num_kv_heads // tensor)
    width = c.kv_rank + c.rope_head_dim if c.name == "deepseek_v3" else 2 * heads * c.head_dim
    return 2 * c.num_layers * rows * (64 + 32) * width


@pytest.mark.parametrize(("config", "mesh"), [
    (GROUPED, {"fsdp": 4, "tensor": 2}), *slow((LATENT, {"fsdp": 4, "tensor": 2})),
    *exhaustive((GPT, {"data": 2, "fsdp": 4}), (WINDOWS, {"fsdp": 8}))])
def test_the_cache_is_that_of_the_formula(config, mesh):
    config, target = learning(config, **{f"mesh__{axis}": n for axis, n in mesh.items()}), targets.TARGETS["v5p"]
    run = build(config, devices=8, platform=target.described)
    found = memory_by_phase(run, target, Counter())
    rows = 32 // (8 // mesh.get("tensor", 1))
    assert found[DECODING][CACHE] == of_cache(config.model, rows, mesh.get("tensor", 1))
    assert found[DECODING][LOGITS] >= rows * config.model.vocab_size * 4
    assert set(found) == {PROMPTS, DECODING}


@pytest.mark.slow
def test_the_copy_is_the_model_as_it_computes_and_the_state_stays():
    """Whole over `fsdp` in bfloat16, beside weights, moments and the first policy."""
    keys = {"mesh__fsdp": 4, "mesh__tensor": 2, "rl__kl": 0.1, "rl__baseline": "value",
            "rl__gather_weights": True}
    guess = estimate(learning(GROUPED, **keys), targets.TARGETS["h200"], 8)
    assert list(guess.answering) == [LAYING_OUT, PROMPTS, DECODING, VALUES]
    weights = guess.answering[DECODING]["parameters"]
    assert guess.answering[DECODING][COPY] == pytest.approx(4 * weights / 2, rel=0.01)
    for parts in guess.answering.values():
        assert all(parts[name] == guess.memory[name] for name in ("parameters", "optimizer", "frozen parameters"))
    assert guess.memory["frozen parameters"] == pytest.approx(weights, rel=0.01), "the reference"
    assert not guess.answering[VALUES][COPY] and not guess.answering[VALUES][CACHE]


def small(memory):
    return dataclasses.replace(targets.TARGETS["h200"], memory=memory / 0.92)


def test_answers_that_do_not_fit_say_what_makes_room():
    """Fewer of them at once: the rows of a device are a power of two, and groups stay whole."""
    def guess(room, group_size=8):
        config = learning(GROUPED, mesh__fsdp=4, mesh__tensor=2, data__global_batch_size=120,
                          rl__group_size=group_size)
        return Estimate(config, small(room), 8, Counter(gradients=30), Time(Counter(), Counter()), Counter(), 0, 1.0, {
            PROMPTS: Counter(parameters=50), DECODING: Counter({"parameters": 20, CACHE: 70, LOGITS: 10})})

    assert guess(100).fits and answers_at_once(guess(100)) == "" and guess(99).worst[0] == DECODING
    assert not guess(99).fits and answers_at_once(guess(99)) == "data.global_batch_size=64"
    assert answers_at_once(guess(35)) == "data.global_batch_size=16"
    assert answers_at_once(guess(29)) == "data.global_batch_size=8"
    assert answers_at_once(guess(29, group_size=12)) == answers_at_once(guess(20)) == ""
    assert room_for_answers(guess(60)) == "use data.global_batch_size=64, for fewer answers at once"
    assert room_for_answers(guess(20)) == "use more devices, a smaller model or a smaller rl.max_new_tokens"
    found = search.Found(guess(60).config, guess(60).target, 8)
    assert found.why(search.Choice({"mesh.fsdp": 4}, guess(60))) == (
        "1e-07 of 6e-08 GB while answering (decoding); key-value cache 7e-08 GB; data.global_batch_size=64 would fit")


@pytest.mark.exhaustive
def test_weights_are_not_gathered_where_their_copy_does_not_fit(monkeypatch):
    """A search, --explain and the check before a run all take it into account."""
    keys = {"mesh__fsdp": 8, "data__global_batch_size": 16, "data__seq_len": 32, "train__remat": "full",
            "model__num_layers": 8, "model__embed_dim": 512, "model__mlp_dim": 2048}
    config = learning(GROUPED, rl__gather_weights=True, **keys)
    copied = estimate(config, targets.TARGETS["h200"], 8)
    rests = estimate(learning(GROUPED, **keys), targets.TARGETS["h200"], 8)
    assert copied.worst[0] == LAYING_OUT and rests.bytes < 0.85 * copied.bytes
    target = small((rests.bytes + 9 * copied.bytes) / 10)
    tight = dataclasses.replace(copied, target=target)
    assert "time of a step, without making the answers that it is trained on: " in explained(tight)
    assert "answers do not fit: use rl.gather_weights=False, with which it takes" in explained(tight)
    nearest = search.beside(config, target, 8)
    assert nearest.estimate.fits and not nearest.estimate.config.rl.gather_weights
    assert "gather_weights=False" in f"{nearest}"
    target = small(copied.bytes / preflight.SURELY / 1.01)
    monkeypatch.setattr(targets, "here", lambda devices=None: target)
    with pytest.raises(jt.UserError, match=r"rl.prompts: answering 16 prompts at once would take about .* GB of "
                       r"a device's .* GB, .* GB of it weights laid out; use rl.gather_weights=False"):
        preflight.check(build(config))


@pytest.mark.parametrize(("config", "mesh", "gathered"), [
    pytest.param(*case, gathered, marks=slow_if(gathered == i % 2 and i in (1, 2)))
    for i, case in enumerate((
        (GPT, {"data": 2, "fsdp": 2}), (GROUPED, {"fsdp": 2, "tensor": 2}), (WINDOWS, {"data": 2, "fsdp": 2}),
        (LATENT, {"fsdp": 2, "expert": 2}))) for gathered in (False, True)])
def test_near_what_the_compiler_of_cpus_says(config, mesh, gathered):
    """The models have a width at which products, rather than their smallest parts, decide."""
    wider = {"model__embed_dim": 256, "model__mlp_dim": 1024, "model__num_layers": 4}
    config = learning(config, rl__gather_weights=gathered, data__global_batch_size=128,
                      **wider, **{f"mesh__{axis}": size for axis, size in mesh.items()})
    devices = math.prod(mesh.values())
    guess = estimate(config, targets.TARGETS["cpu"], devices).answering
    real = compile_answering(config, targets.TARGETS["cpu"], devices)
    assert guess.keys() == real.keys()
    for phase, size in real.items():
        assert guess[phase].total() == pytest.approx(size, rel=0.2 if phase == DECODING else 0.12), phase


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.exhaustive if i % 3 else pytest.mark.slow) for i, name in enumerate(CASES)])
def test_near_what_compilers_of_accelerators_say(name):
    if "DeepSeek" in name and jax.__version_info__ < (0, 11):
        pytest.skip("before JAX 0.11 kernels of grouped products are not used")
    guess = bench_plan.predicted(CASES[name]).answering
    assert guess.keys() == KEPT[name].keys()
    for phase, size in KEPT[name].items():
        assert guess[phase].total() == pytest.approx(size, rel=LARGER.get((name, phase), 0.15)), phase


def test_the_table_in_the_docs_is_of_these_programs():
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    assert KEPT.keys() == CASES.keys()
    assert all(f"| {name} | {phase} |" in page for name, phases in KEPT.items() for phase in phases)


@pytest.mark.slow
def test_a_reward_model_rests_beside_the_run(tmp_path):
    """Each phase and the step count its weights, over all devices, and the program that scores answers."""
    judge = jt.load_config("configs/llama3_1b.py:tiny", {
        "preference.loss": "reward", "data.packing": "pairs", "train.init_from": "elsewhere"})
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(judge.to_dict()))
    target = targets.TARGETS["h200"]
    alone, beside, elsewhere = (estimate(learning(GPT, mesh__fsdp=8, **keys), target, 8) for keys in (
        {}, {"rl__reward": f"model:{tmp_path}"}, {"rl__reward": f"model:{tmp_path / 'gone'}"}))
    c = judge.model
    heads = c.num_heads + c.num_kv_heads
    size = 4 / 8 * (c.embed_dim * (c.vocab_size + 1 + 1) + c.num_layers * (
        2 * c.embed_dim + 3 * c.embed_dim * c.mlp_dim + 2 * c.embed_dim * c.head_dim * heads))
    assert beside.memory["reward model"] == pytest.approx(size, rel=0.01)
    assert beside.memory - alone.memory == Counter({"reward model": beside.memory["reward model"]})
    assert beside.answering.keys() == {*alone.answering, REWARDS} and elsewhere.answering == alone.answering
    for phase, parts in alone.answering.items():
        assert beside.answering[phase].total() == parts.total() + beside.memory["reward model"]
    assert beside.answering[REWARDS].total() > beside.memory["reward model"] + total(build(
        learning(GPT, mesh__fsdp=8), devices=8, platform=target.described).abstract)

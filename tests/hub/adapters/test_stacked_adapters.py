"""Several adapters beside one model: each row's text and log-probabilities are those of its adapter loaded alone."""

import functools
import json

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.errors import UserError
from jaxtrain.hub import trained_model
from jaxtrain.hub.adapters import adapter_files, adapter_merge, stacked_adapters
from jaxtrain.hub.decoding import decoding
from jaxtrain.hub.scoring import score
from jaxtrain.hub.weights import safetensors_files
from jaxtrain.models import lora
from tests.hub import published
from tests.hub.adapters import published_adapters
from tests.tiers import exhaustive, slow

SLOW = pytest.mark.slow
FEW = [[5, 3], [5, 3], [5, 3], [11, 6, 1, 8], [3, 2], [20], [13, 1]]
STOPS = (3, 9, 14, 17)
MORE = {"fsdp": {"mesh.data": "1", "mesh.fsdp": "8"},
        "tensor": {"mesh.data": "2", "mesh.fsdp": "2", "mesh.tensor": "2"}}
RANKS = {  # of adapters: name: (rank, what else adapter_config.json says, ends of the modules that have one)
    "all": (3, {"lora_alpha": 6}, None),
    "few": (5, {"lora_alpha": 2, "use_rslora": True}, ("q_proj", "v_proj", "c_proj", "gate_proj")),
    "one": (1, {"lora_alpha": 3}, ("o_proj", "c_attn", "down_proj"))}


def write(folder, case, name):
    """Write the adapters of a case with another rank and other numbers; return their folder."""
    rank, said, ends = RANKS[name]
    wide = case["config"]["r"]
    shapes = {key: tuple(rank if size == wide else size for size in shape) for key, shape in case["tensors"].items()
              if ends is None or any(f".{end}." in key for end in ends)}
    folder.mkdir(parents=True)
    (folder / adapter_files.CONFIG).write_text(json.dumps(case["config"] | said | {"r": rank}))
    safetensors_files.write(folder / adapter_files.WEIGHTS, shapes, dict.fromkeys(shapes, np.float32),
                            (2 * published.weight(f"{name} {key}", shape) for key, shape in shapes.items()))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folder of a case's model, and those of adapters for it by name."""
    @functools.cache
    def made(case):
        base, _ = published_adapters.written(tmp_path_factory.mktemp("stacked"), case)
        return base, {name: write(base.with_name(name), published_adapters.truth()[case], name) for name in RANKS}
    return made


def said(run, state, prompts, **keys):
    return jt.generate(run, state, prompts, max_new_tokens=6, temperature=0, logprobs=True, stop=STOPS, **keys)


def check(found, wanted):
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def alone(folders):
    """Return what each adapter, loaded alone, makes of all prompts; of the model itself under None."""
    @functools.cache
    def made(case, name):
        base, adapters = folders(case)
        return said(*jt.load_model(adapters[name] if name else base), FEW)
    return made


@pytest.mark.exhaustive  # on a mesh, and where rows are refilled, the next one
@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma3"])
def test_each_prompt_is_continued_as_by_its_adapter_alone(case, folders, alone):
    base, adapters = folders(case)
    names = ["few", None, "all", "one", "one", "few", "all"]
    run, state = jt.load_model(base, adapters=adapters)
    found = said(run, state, FEW, adapters=names)
    assert len({one.tokens for one in found[:3]}) == 3  # of the same prompt
    for name in [*RANKS, None]:
        rows = [row for row in range(len(FEW)) if names[row] == name]
        check([found[row] for row in rows], [alone(case, name)[row] for row in rows])


@pytest.mark.parametrize("mesh", [
    pytest.param("fsdp", marks=pytest.mark.exhaustive), pytest.param("tensor", marks=SLOW)])
def test_on_any_mesh_rows_that_are_refilled_take_their_own_adapters(mesh, folders, alone):
    base, adapters = folders("llama")
    run, state = jt.load_model(base, MORE[mesh], adapters=adapters)
    rows, names = [n % len(FEW) for n in range(24)], [[*RANKS, None][n * 5 % 4] for n in range(24)]
    steps, programs = [], decoding(run)
    put = type(programs).put
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(programs), "put", lambda *given: steps.append(1) or put(*given))
        found = said(run, state, [FEW[row] for row in rows], adapters=names, batch_size=8)
    assert steps
    check(found, [alone("llama", name)[row] for row, name in zip(rows, names, strict=True)])


@pytest.mark.parametrize("mesh", [
    *slow("tensor"), *exhaustive(None, "fsdp")])
def test_texts_are_scored_as_by_each_adapter_alone(mesh, folders):
    base, adapters = folders("llama")
    run, state = jt.load_model(base, MORE.get(mesh), adapters=adapters)
    names = ["few", None, "all", "one", "one"]
    pairs = [(FEW[row], [7, 2, 9][:row % 3 + 1]) for row in range(len(names))]
    found = score(run, state.all_params, pairs, batch_size=2, chosen=stacked_adapters.chosen(state, len(pairs), names))
    for pair, name, one in zip(pairs, names, found, strict=True):
        plain, alone = jt.load_model(adapters[name] if name else base)
        want, = score(plain, alone.all_params, [pair])
        np.testing.assert_allclose(one.logprobs, want.logprobs, rtol=1e-5, atol=1e-5)


@SLOW
def test_adapters_are_loaded_and_unloaded_beside_the_same_weights(folders, alone):
    base, adapters = folders("llama")
    first = jt.load_model(base, adapters={"few": adapters["few"]})
    second = jt.with_adapters(*first, {"all": adapters["all"], "few": adapters["few"]})
    third = jt.with_adapters(*second, {})
    for run, state in (second, third):
        kept = jax.tree.leaves(lora.without_adapters(state.all_params))
        assert all(a is b for a, b in zip(jax.tree.leaves(lora.without_adapters(first[1].all_params)), kept,
                                          strict=True))
        check(said(run, state, FEW), alone("llama", None))
    for name in ("all", "few"):
        check(said(*second, FEW, adapters=[name] * len(FEW)), alone("llama", name))
    assert first[0].config.lora.rank == 5 and second[0].config.lora.rank == 8 and third[0].config.lora.rank == 0


@pytest.mark.exhaustive
def test_the_weights_beside_them_may_rest_in_few_bits(folders):
    base, adapters = folders("llama")
    run, state = jt.load_model(base, {"lora.quantize": "int8"}, adapters=adapters)
    found = said(run, state, FEW, adapters=["few"] * len(FEW))
    sections = trained_model.sections_of(adapters["few"])
    one = trained_model.model_of(sections | {"lora": sections["lora"] | {"quantize": "int8"}}, {}, "data")
    check(found, said(one, trained_model.with_params(one, trained_model.load(adapters["few"], one)[0]), FEW))
    emptied = jt.with_adapters(run, state, {})
    check(said(*emptied, FEW), said(run, state, FEW))
    assert emptied[0].config.lora.quantize == "int8"


def test_what_cannot_be_stacked_is_refused_in_a_sentence(tmp_path, folders):
    for case, reason in (("llama, dora", "has DoRA"), ("latents", "adapts kv_b_proj")):
        base, folder = published_adapters.written(tmp_path / case, case)
        with pytest.raises(UserError, match=reason):
            jt.load_model(base, adapters={"style": folder})
    base, adapters = folders("gpt2")
    with pytest.raises(UserError, match="name the model's folder first"):
        adapter_merge.merge(adapters["few"], [(base, 1.0)], tmp_path / "merged")
    with pytest.raises(UserError, match="not a folder of adapters"):
        jt.load_model(base, adapters={"style": base})
    with pytest.raises(UserError, match="has adapters already"):
        jt.load_model(adapters["few"], adapters={"style": adapters["few"]})

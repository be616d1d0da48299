"""Several adapters beside one model: each row's text and log-probabilities are those of its adapter loaded alone."""

import functools
import json

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.errors import UserError
from jaxtrain.hub import trained_model
from jaxtrain.hub.adapters import adapter_files
from jaxtrain.hub.weights import safetensors_files
from tests.hub import published
from tests.hub.adapters import published_adapters

SLOW = pytest.mark.slow
FEW = [[5, 3], [2, 9, 4], [7], [11, 6, 1, 8], [3, 2], [20], [13, 1]]
STOPS = (3, 9, 14, 17)
MORE = {"fsdp": {"mesh.data": "1", "mesh.fsdp": "8"}, "tensor": {"mesh.data": "2", "mesh.fsdp": "2", "mesh.tensor": "2"}}
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
                            (4 * published.weight(f"{name} {key}", shape) for key, shape in shapes.items()))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """-> the folder of a case's model, and those of adapters for it by name."""
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
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize("case", ["gpt2", pytest.param("llama", marks=SLOW), pytest.param("gemma3", marks=SLOW)])
def test_each_prompt_is_continued_as_by_its_adapter_alone(case, folders):
    base, adapters = folders(case)
    names = ["few", None, "all", "one", "one", "few", "all"]
    run, state = jt.load_model(base, adapters=adapters)
    found = said(run, state, FEW, adapters=names)
    for name in (*adapters, None):
        rows = [row for row in range(len(FEW)) if names[row] == name]
        alone = said(*jt.load_model(adapters[name] if name else base), FEW)
        check([found[row] for row in rows], [alone[row] for row in rows])
    assert len({one.tokens for one in said(run, state, FEW[:1] * 4, adapters=[*adapters, None])}) > 2

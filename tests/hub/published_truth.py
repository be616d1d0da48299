"""Compute with Hugging Face's transformers tiny published models, for the tests of import and export.

    python -m tests.hub.published_truth            # writes all of tests/hub/published_truth/
    python -m tests.hub.published_truth NAME ...   # writes these cases
    python -m tests.hub.published_truth --exports  # loads what jaxtrain exports, and compares logits and rewards

Needs torch and transformers, which the tests do not: the logits, the shapes of all tensors as they are on disk, and of
every gradient its norm and two projections are kept. It computes in float64, also what the models themselves compute in
float32.
"""

import argparse
import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from jaxtrain.hub.weights import safetensors_files
from tests.hub import published
from tests.hub.cases import CASES

LIKE = {"kimi_k2": "deepseek_v3"}  # types that transformers has no class for, and those that they are
OWN = {"mistral4": "Mistral4ForCausalLM"}  # classes that `AutoModelForCausalLM` does not know


def torch_model(folder: Path, kind: Any = transformers.AutoModelForCausalLM) -> Any:
    """The model in a folder, in float64."""
    given = json.loads((folder / "config.json").read_text())
    if given["model_type"] in LIKE:
        (folder / "config.json").write_text(json.dumps(given | {"model_type": LIKE[given["model_type"]]}))
    if kind is transformers.AutoModelForCausalLM and given["model_type"] in OWN:
        kind = getattr(transformers, OWN[given["model_type"]])
    model, told = kind.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float64,
        output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    return model.eval()


def as_published(kind: str, named: dict[str, Any]) -> dict[str, Any]:
    """Give tensors that transformers 5.24 writes by another name than models of this type were published the latter."""
    if kind == "kimi_linear":  # an MLP that is not of experts
        return {re.sub(r"block_sparse_moe(\.\w+_proj\.)", r"mlp\1", name): it for name, it in named.items()}
    if kind == "olmo_hybrid":  # the norms of layers with attention
        full = {name.partition(".self_attn.")[0] for name in named if ".self_attn." in name}
        return {name.replace("feedforward_layer_norm", "post_attention_layernorm")
                if name.rpartition(".feedforward_layer_norm")[0] in full else name: it for name, it in named.items()}
    return named


def made(kind: str, keys: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what transformers writes to disk of a model of this type: its config and the shapes of its tensors."""
    config = transformers.AutoConfig.for_model(LIKE.get(kind, kind), **keys)
    model = getattr(transformers, OWN[kind])(config) if kind in OWN else (
        transformers.AutoModelForCausalLM.from_config(config))
    model.save_pretrained(folder)
    return {"config": json.loads((folder / "config.json").read_text()) | {"model_type": kind},
            "tensors": as_published(kind, {
                name: t.shape for name, t in safetensors_files.tensors_of(folder).items()})}


def on_disk(model: Any, folder: Path, of: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """These tensors, one for each parameter in memory, by the names and in the layouts that they have on disk."""
    import copy

    other = copy.deepcopy(model).float()
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(of[name])
    other.save_pretrained(folder)
    return as_published(other.config.model_type, {
        name: np.array(tensor.view()) for name, tensor in safetensors_files.tensors_of(folder).items()})


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """A context in which what a model converts to float32 becomes float64."""
    narrow, to_narrow = torch.float32, torch.Tensor.float
    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.Tensor.float = narrow, to_narrow


def computed(folder: Path, scratch: Path) -> dict[str, Any]:
    """Logits of the tokens, and the gradient of the mean cross-entropy of each next one."""
    model, tokens = torch_model(folder).double(), torch.tensor(published.TOKENS, dtype=torch.long)
    with in_float64():
        logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]),
                                                 tokens[:, 1:].reshape(-1))
        loss.backward()
        prompts = torch.tensor(published.PROMPTS, dtype=torch.long)
        model.generation_config.eos_token_id = None
        # Without a cache: steps of transformers 5.24 with one differ from its whole pass for Mamba-2.
        longer = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=published.NEW,
                                do_sample=False, pad_token_id=0, use_cache=False)
    of = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    untrained = [*dict(model.named_buffers()), *(name for name, p in model.named_parameters() if p.grad is None)]
    return {"logits": [float(f"{x:.9g}") for x in logits.detach().numpy().reshape(-1)], "loss": float(loss.detach()),
            "greedy": longer[:, published.PROMPTS.shape[1]:].tolist(),
            "gradients": {name: [float(f"{x:.8g}") for x in published.projections(name, tensor)]
                          for name, tensor in on_disk(model, scratch, of).items()
                          if not any(name.endswith(key.split(".")[-1]) for key in [*untrained, "expert_bias"])}}


def exported(name: str, case: dict[str, Any]) -> float:
    """The largest error of the logits of what jaxtrain exports, relative to the largest logit."""
    import jaxtrain as jt
    from jaxtrain.config.family import config_of
    from jaxtrain.hf.hf_config import config_json, model_section
    from jaxtrain.hub.weights import published_weights

    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        folder, to = published.write(Path(first) / "in", case), Path(second)
        section = model_section(folder)
        model = config_of(section)
        run = jt.build(jt.make_config({"model": section, "data": {"seq_len": 8}, "mesh": {"data": 1}}))
        params = published_weights.load(folder, model, run.abstract.all_params)
        published_weights.save(params, model, to, np.float32, 10_000)
        (to / "config.json").write_text(json.dumps(config_json(model)))
        network = torch_model(to).double()  # before what reads files takes float32 for something else
        with in_float64():
            logits = network(torch.tensor(published.TOKENS, dtype=torch.long)).logits
        logits = logits.detach().numpy().reshape(-1)
    wanted = np.asarray(case["logits"])
    return float(np.abs(logits - wanted).max() / np.abs(wanted).max())


def rewarded(case: dict[str, Any]) -> float:
    """The largest error of the rewards of what jaxtrain exports with a reward head, relative to the largest reward."""
    import jax

    import jaxtrain as jt
    from jaxtrain.hf.hf_config import config_json, model_section
    from jaxtrain.hub.weights import published_weights

    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        folder, to = published.write(Path(first) / "in", case), Path(second)
        run = jt.build(jt.make_config({
            "model": model_section(folder), "data": {"seq_len": 8, "packing": "pairs"}, "mesh": {"data": 1},
            "preference": {"loss": "reward"}}))
        head = run.abstract.params["reward_head"]["kernel"]
        weights = np.random.default_rng(5).normal(size=head.shape).astype(np.float32)
        params = published_weights.load(folder, run.config.model, run.abstract.params) | {
            "reward_head": {"kernel": jax.device_put(weights, head.sharding)}}
        published_weights.save(params, run.config.model, to, np.float32, 10_000)
        (to / "config.json").write_text(json.dumps(config_json(run.config.model, True) | {"pad_token_id": 0}))
        tokens = torch.tensor(np.pad(published.TOKENS, [(0, 0), (0, 2)]), dtype=torch.long)
        model = torch_model(to, transformers.AutoModelForSequenceClassification)
        assert type(model).__name__ == config_json(run.config.model, True)["architectures"][0]
        rewards = model(tokens).logits.detach().numpy()
        last = torch_model(folder).base_model(tokens).last_hidden_state[:, published.TOKENS.shape[1] - 1]
        wanted = last.detach().numpy() @ weights
    return float(np.abs(rewards - wanted).max() / np.abs(wanted).max())


def has_rewards(kind: str) -> bool:
    """Return whether a model of this type can be published as a reward model."""
    from jaxtrain.hf.hf_config import types

    return next(iter(types()[kind].values())).classifier is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--exports", action="store_true")
    args = parser.parse_args()
    if args.exports:
        return exports(args.names or list(CASES))
    by = {"transformers": transformers.__version__, "torch": torch.__version__}
    for name in args.names or CASES:
        kind, keys = CASES[name]
        with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b, tempfile.TemporaryDirectory() as c:
            case = made(kind, keys, Path(a))
            case |= computed(published.write(Path(b), case), Path(c))
        (published.TRUTH / f"{name}.json").write_text(json.dumps({"made_by": by} | case, separators=(",", ":")) + "\n")
        print(name, len(case["tensors"]), "tensors, loss", case["loss"])
    return 0


def exports(names: list[str]) -> int:
    """Load what jaxtrain exports of these cases, print the errors, and return 1 if one is large."""
    errors = {}
    for name in names:
        errors[name] = exported(name, case := published.truth(name))
        if has_rewards(case["config"]["model_type"]):
            errors[f"{name}, rewards"] = rewarded(case)
    print(*(f"{name:27} {error:.1e}" for name, error in errors.items()), sep="\n")
    return int(max(errors.values()) > 1e-6)


if __name__ == "__main__":
    sys.exit(main())

"""Rule by rule: an override that makes sense changes no number, one that does not is refused in a sentence."""

import functools

import pytest

import jaxtrain as jt
from jaxtrain.sharding.axis_rules import CONFIG_KEYS
from tests.numerics import reference
from tests.tiers import exhaustive, slow

MESH = (2, 2, 2)
FEW_KEY_HEADS = dict(model__num_kv_heads=2)  # fewer than the devices over which heads are split


def first_steps(run):
    state, step = run.init(), reference.compiled(run)
    state, first = step(state, run.sharded.place(reference.batch(0)))
    _, second = step(state, run.sharded.place(reference.batch(1)))
    return [float(metrics[key]) for metrics in (first, second) for key in ("loss", "grad_norm")]


@functools.cache
def on_one_device(**keys):
    return first_steps(reference.build("llama", **keys))


@pytest.mark.parametrize(("overrides", "mesh", "keys"), [
    *slow(({"heads": "none", "kv_heads": "none"}, MESH, FEW_KEY_HEADS),
          ({"kv_heads": "none"}, (1, 2, 4), FEW_KEY_HEADS)),
    *exhaustive(*(({name: "none"}, MESH, {}) for name in ("block_seq", "vocab", "embed", "norm", "kv_heads", "mlp")),
                ({"heads": "none", "kv_heads": "none"}, MESH, {}))],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value))
def test_sensible_overrides_change_no_number(overrides, mesh, keys):
    both = overrides | {f"act_{name}": axis for name, axis in overrides.items()
                        if name in ("heads", "kv_heads", "mlp", "vocab")}
    rules = {f"mesh__overrides__{name}": axis for name, axis in both.items()}
    want = on_one_device(**keys)
    assert first_steps(reference.build("llama", mesh, **rules, **keys)) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("name", sorted(CONFIG_KEYS))
@pytest.mark.parametrize("axis", ["tensor", *slow("none"), *exhaustive("fsdp")])
def test_any_single_override_lowers_or_is_refused(name, axis):
    try:
        reference.build("llama", MESH, **{f"mesh__overrides__{name}": axis}).lower()
    except jt.UserError as refusal:
        assert "\n" not in str(refusal)

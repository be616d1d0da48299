"""Rule by rule: an override that makes sense changes no number, one that does not is refused in a sentence."""

import pytest

import jaxtrain as jt
from jaxtrain.sharding.rules import CONFIG_KEYS
from tests.numerics import reference
from tests.tiers import exhaustive, slow

MESH = (2, 2, 2)


def first_steps(run):
    state, step = run.init(), reference.compiled(run)
    state, first = step(state, run.place(reference.batch(0)))
    _, second = step(state, run.place(reference.batch(1)))
    return [float(metrics[key]) for metrics in (first, second) for key in ("loss", "grad_norm")]


@pytest.mark.parametrize("overrides", [
    *slow({"heads": "none", "kv_heads": "none"}),
    *exhaustive({"block_seq": "none"}, {"vocab": "none"}, {"embed": "none"}, {"norm": "none"}, {"kv_heads": "none"},
                {"mlp": "none"})], ids="+".join)
def test_sensible_overrides_change_no_number(overrides):
    both = overrides | {f"act_{name}": axis for name, axis in overrides.items()
                        if name in ("heads", "kv_heads", "mlp", "vocab")}
    keys = {f"mesh__overrides__{name}": axis for name, axis in both.items()}
    want = first_steps(reference.build("llama"))
    assert first_steps(reference.build("llama", MESH, **keys)) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("name", sorted(CONFIG_KEYS))
@pytest.mark.parametrize("axis", ["tensor", *(pytest.param(axis, marks=pytest.mark.slow) for axis in ("none", "fsdp"))])
def test_any_single_override_lowers_or_is_refused(name, axis):
    try:
        reference.build("llama", MESH, **{f"mesh__overrides__{name}": axis}).lower()
    except jt.UserError as refusal:
        assert "\n" not in str(refusal)


@pytest.mark.slow
def test_fewer_key_heads_than_devices():
    keys = dict(mesh__overrides__kv_heads="none", mesh__overrides__act_kv_heads="none", model__num_kv_heads=2)
    want = first_steps(reference.build("llama", model__num_kv_heads=2))
    assert first_steps(reference.build("llama", (1, 2, 4), **keys)) == pytest.approx(want, rel=1e-5)

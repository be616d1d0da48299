"""Gemma 4's config.json, whose layers are of two kinds, to our keys and back."""

from typing import Any

from jaxtrain.hf import defaults
from jaxtrain.hf.hf_format import Keys, Refuse
from jaxtrain.hf.layer_patterns import FULL, SLIDING, pattern, published_pattern
from jaxtrain.hf.soft_caps import LOGITS, published_soft_caps, soft_caps

LOCAL, GLOBAL = "L", "G"
LETTERS = {SLIDING: LOCAL, FULL: GLOBAL}
_USUAL = {SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
          FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}}
_EXPERTS = {"num_experts": "num_experts", "top_k_experts": "experts_per_token",
            "moe_intermediate_size": "expert_mlp_dim"}
_OVERRIDDEN = ("head_dim", "num_key_value_heads")


def read(known: Keys, refuse: Refuse) -> Keys:
    """Return our keys of a config.json."""
    listed = known["layer_types"]
    if listed is None:
        listed = [FULL if (n + 1) % 6 == 0 else SLIDING for n in range(known["num_hidden_layers"])]
    listed = [*listed[:-1], FULL]  # whatever the file says of the last layer
    found = pattern(known | {"layer_types": listed}, refuse, LETTERS) | _heads(known, listed, refuse)
    shared, width = known["num_kv_shared_layers"], known["hidden_size_per_layer_input"]
    if shared < 0 or (shared and {*listed[:len(listed) - shared]} != {*listed}):
        raise refuse("num_kv_shared_layers", "cannot be expressed: no layer of each kind has keys of its own")
    if width < 0 or (width and known["vocab_size_per_layer_input"] < known["vocab_size"]):
        raise refuse("hidden_size_per_layer_input" if width < 0 else "vocab_size_per_layer_input",
                     "cannot be expressed: each token needs an input for each layer")
    found |= {"shared_kv_layers": shared, "per_layer_dim": width,
              "per_layer_vocab": known["vocab_size_per_layer_input"] if width else 0}
    return found | _positions(known, {*listed}, refuse) | _experts(known, refuse) | soft_caps(known, refuse, LOGITS)


def _heads(known: Keys, listed: list[str], refuse: Refuse) -> Keys:
    """Return our keys of the heads of global layers."""
    base = {"head_dim": known["head_dim"], "num_key_value_heads": known["num_key_value_heads"]}
    if "per_layer_config" not in known:
        width, heads = known.get("global_head_dim", 512), known.get("num_global_key_value_heads")
        if defaults.misfit(width, ["int"]) or width < 1:
            raise refuse("global_head_dim", "is not a size that a head has")
        if defaults.misfit(heads, ["int", "null"]) or (heads or 1) < 1:
            raise refuse("num_global_key_value_heads", "is not a number of heads")
        own = base | {"head_dim": width} | (
            {"num_key_value_heads": heads} if known["attention_k_eq_v"] and heads else {})
    else:
        own = _overridden(known["per_layer_config"] or {}, base, listed, refuse)
    return {"global_head_dim": own["head_dim"], "global_kv_heads": own["num_key_value_heads"]}


def _overridden(given: Any, base: Keys, listed: list[str], refuse: Refuse) -> Keys:
    """Return the sizes of global layers, of what a file says of each layer by its number."""
    if not isinstance(given, dict) or not all(isinstance(one, dict) for one in given.values()):
        raise refuse("per_layer_config", "cannot be read: it is not an object of objects")
    numbers = [f"{n}" for n in range(len(listed))]
    if {*given} - {*numbers}:
        raise refuse("per_layer_config", "cannot be read: its keys are not numbers of layers")
    each = [base | given.get(number, {}) for number in numbers]
    if any(one.keys() - {*_OVERRIDDEN} or any(defaults.misfit(size, ["int"]) or size < 1 for size in one.values())
           for one in each):
        raise refuse("per_layer_config", "cannot be expressed: only head_dim and num_key_value_heads of layers can")
    own = next(one for one, kind in zip(each, listed, strict=True) if kind == FULL)
    if any(one != (own if kind == FULL else base) for one, kind in zip(each, listed, strict=True)):
        raise refuse("per_layer_config", "cannot be expressed: global layers have sizes of their own, and they alone")
    return own


def _positions(known: Keys, kinds: set[str], refuse: Refuse) -> Keys:
    """Return our keys of rotary positions."""
    if known.get("rope_scaling"):
        raise refuse("rope_scaling", "cannot be expressed: rope_parameters say it for each kind of layers")
    both: Keys = dict(_USUAL) if known["rope_parameters"] is None else known["rope_parameters"]
    for kind in sorted(kinds):
        one = both.get(kind)
        if not isinstance(one, dict) or defaults.misfit(one.get("rope_theta"), ["float"]) or one["rope_theta"] <= 0:
            raise refuse("rope_parameters", f"cannot be read: it has no object with a rope_theta for {kind}")
        for key in ("partial_rotary_factor", "factor"):
            if defaults.misfit(one.get(key, 1.0), ["float"]) or one.get(key, 1.0) < 0:
                raise refuse("rope_parameters", f"cannot be read: the {key} of {kind} is not a number from 0 on")
    far, near = both.get(FULL, _USUAL[FULL]), both.get(SLIDING, _USUAL[SLIDING])
    ways = [one.get("rope_type", one.get("type", "default")) for one in (far, near)]
    if ways[0] not in ("default", "proportional") or (SLIDING in kinds and ways[1] != "default"):
        raise refuse("rope_parameters", "cannot be expressed: positions are plain, or proportional in global layers")
    scaled = far if ways[0] == "proportional" else {}
    part, factor = (float(scaled.get(key, 1.0)) for key in ("partial_rotary_factor", "factor"))
    if part > 1 or factor == 0:
        raise refuse("rope_parameters", "cannot be expressed: a part of a head turns, divided by a factor above 0")
    return {"rope_theta": float(far["rope_theta"]), "rotary_part": part, "rope_factor": factor} | (
        {"local_rope_theta": float(near["rope_theta"])} if SLIDING in kinds else {})


def _experts(known: Keys, refuse: Refuse) -> Keys:
    """Return our keys of experts."""
    if not known["enable_moe_block"]:
        return {"num_experts": 0}
    for key in _EXPERTS:
        if known[key] is None or known[key] < 1:
            raise refuse(key, "is not a size that experts have")
    return {ours: known[key] for key, ours in _EXPERTS.items()}


def write(c: Any) -> Keys:
    """Return the published keys that are not equal to one of ours."""
    far = {"rope_type": "proportional", "partial_rotary_factor": c.rotary_part, "rope_theta": c.rope_theta} | (
        {"factor": c.rope_factor} if c.rope_factor != 1 else {})
    return published_soft_caps(c, LOGITS) | {
        "layer_types": published_pattern(c.layer_kinds.upper(), LETTERS),
        "rope_parameters": {FULL: far, SLIDING: {"rope_type": "default", "rope_theta": c.local_rope_theta}},
        "num_global_key_value_heads": c.global_kv_heads if c.keys_are_values else None,
        "global_head_dim": c.global_head_dim, "num_kv_shared_layers": c.shared_kv_layers,
        "hidden_size_per_layer_input": c.per_layer_dim, "vocab_size_per_layer_input": c.per_layer_vocab or c.vocab_size,
        "enable_moe_block": c.num_experts > 0,
        **{key: getattr(c, ours) if c.num_experts else None for key, ours in _EXPERTS.items()}}

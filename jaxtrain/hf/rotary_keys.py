"""Rotary positions as published models declare them, to our keys and back.

There are two forms, `rope_parameters` and the older `rope_scaling` beside `rope_theta`. Of a file that mixes them, what
transformers takes counts.

With LongRoPE each pair's frequency has a divisor for texts up to the original length, and another for longer ones. The
original length is what `model.max_seq_len` becomes: up to it all texts have the positions that transformers gives them.
"""

import math

from jaxtrain.config.decoder_config import PartialRotaryConfig, RotaryConfig
from jaxtrain.hf import defaults
from jaxtrain.hf.hf_format import Keys, Refuse
from jaxtrain.hf.layer_patterns import FULL, SLIDING, global_every

_SCALINGS = {"linear": (), "dynamic": (), "llama3": ("low_freq_factor", "high_freq_factor"),
             "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
             "longrope": ()}
_NEEDED = {"llama3": ("factor", "low_freq_factor", "high_freq_factor")} | dict.fromkeys(
    ("linear", "dynamic", "yarn"), ("factor",))
_NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
            "mscale", "mscale_all_dim", "partial_rotary_factor")
_WITHOUT_LENGTH = ("linear", "dynamic")
_ZERO_IS_NONE = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # to transformers as well


def partial_rotary(kind: str, usual: float, known: Keys, refuse: Refuse) -> Keys:
    """Return our keys of rotary positions of a part of each head.

    `usual`: which part, where a file does not say. One that says null means all of it.
    """
    where = "rope_scaling" if known.get("rope_scaling") else "rope_parameters"
    inside = "partial_rotary_factor" in (known.get(where) or {})
    part = known[where]["partial_rotary_factor"] if inside else known.get("partial_rotary_factor", usual)
    if defaults.misfit(part, ["float", "int"] if inside else ["float", "int", "null"]):
        raise refuse(where if inside else "partial_rotary_factor",
                     "cannot be read: its partial_rotary_factor is not a number")
    without = {key: value for key, value in known.items() if key != "partial_rotary_factor"}
    without |= {key: {name: value for name, value in known[key].items() if name != "partial_rotary_factor"}
                for key in ("rope_scaling", "rope_parameters") if known.get(key)}
    return {"rotary_part": float(1.0 if part is None else part)} | rotary(kind, without, refuse)


def published_partial_rotary(c: PartialRotaryConfig) -> Keys:
    """Return the keys of rotary positions of a part of each head."""
    return published_rotary(c) | {"partial_rotary_factor": c.rotary_part}


def rotary(kind: str, known: Keys, refuse: Refuse, usual: Keys | None = None) -> Keys:
    """Return our keys of rotary positions.

    `usual`: the rope_parameters of this model type where a file has none.
    """
    newer = known.get("rope_parameters")
    newer = usual if newer is None else newer
    where = "rope_scaling" if known.get("rope_scaling") else "rope_parameters"
    scaling = known.get("rope_scaling") or newer or {}
    if scaling.get("partial_rotary_factor", known.get("partial_rotary_factor")) not in (1, None):
        raise refuse(where if "partial_rotary_factor" in scaling else "partial_rotary_factor",
                     "cannot be expressed: all of a head's width turns")
    scaling = {"rope_theta": known.get("rope_theta", defaults.table()[kind]["theta"])} | scaling
    way = _way(scaling, where, refuse)
    found = {"rope_theta": float(scaling["rope_theta"])}
    if way not in ("yarn", "default") and scaling.get("mscale_all_dim"):
        raise refuse(where, "cannot be expressed: mscale_all_dim without yarn")
    if way == "longrope":
        return found | _long_rope(where, scaling, known, refuse)
    if way == "default" or (scaling["factor"] == 1 and not scaling.get("attention_factor")):
        return found
    found |= {"rope_type": way, "rope_scaling": float(scaling["factor"])}
    if way not in _WITHOUT_LENGTH:
        found["rope_original_len"] = known.get("original_max_position_embeddings") or scaling.get(
            "original_max_position_embeddings", known["max_position_embeddings"])
    if scaling.get("attention_factor") == 0:
        raise refuse(where, "cannot be expressed: its attention_factor is 0")
    return found | {f"rope_{key}": scaling[key] for key in _SCALINGS[way]
                    if scaling.get(key) is not None and not (key in _ZERO_IS_NONE and not scaling[key])}


def _long_rope(where: str, scaling: Keys, known: Keys, refuse: Refuse) -> Keys:
    """Return our keys of LongRoPE."""
    for key in ("short_factor", "long_factor"):
        if type(scaling.get(key)) is not list or not scaling[key] or any(
                defaults.misfit(one, ["float"]) for one in scaling[key]):
            raise refuse(where, f"cannot be read: its {key} is not a list of numbers")
    for key in ("factor", "attention_factor"):
        if scaling.get(key) is not None and scaling[key] <= 0:
            raise refuse(where, f"cannot be read: its {key} is not a positive number")
    longest = known["max_position_embeddings"]
    outside = known.get("original_max_position_embeddings")
    length = scaling.get("original_max_position_embeddings", longest) if outside is None else outside
    if length < 2:
        raise refuse(where if outside is None else "original_max_position_embeddings", "is not the length of a text")
    factor = longest / length if scaling.get("factor") is None else scaling["factor"]
    turn = scaling.get("attention_factor") or (
        math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0)
    return {"rope_short_factor": [*map(float, scaling["short_factor"])], "rope_turn_factor": float(turn),
            "rope_long_factor": [*map(float, scaling["long_factor"])], "rope_original_len": length,
            "max_seq_len": min(longest, length)}


def _way(scaling: Keys, where: str, refuse: Refuse) -> str:
    """Return how positions are scaled, once all that this way reads is as it should be."""
    way = scaling.get("rope_type", scaling.get("type", "default"))
    if any(isinstance(value, dict) for value in scaling.values()):
        raise refuse(where, "cannot be expressed: it has parameters for each kind of layer")
    if way not in ("default", *_SCALINGS):
        raise refuse(where, "cannot be expressed: its type is not linear, dynamic, llama3, yarn or longrope")
    for key in _NUMBERS:
        needed = key == "rope_theta" or key in _NEEDED.get(way, ())
        if needed and scaling.get(key) is None:
            raise refuse(where, f"has no {key}")
        if scaling.get(key) is not None and defaults.misfit(scaling[key], ["float"]):
            raise refuse(where, f"cannot be read: its {key} is not a number")
    if defaults.misfit(scaling.get("original_max_position_embeddings", 1), ["int"]):
        raise refuse(where, "cannot be read: its original_max_position_embeddings is not a whole number")
    if type(scaling.get("truncate", True)) is not bool:
        raise refuse(where, "cannot be read: its truncate is not true or false")
    if scaling.get("partial_rotary_factor") not in (1, None):
        raise refuse(where, "cannot be expressed: all of a head's width turns, and partial_rotary_factor is not 1")
    return way


def gemma_layers(known: Keys, refuse: Refuse) -> Keys:
    """Return Gemma 3's keys of local and global layers and their rotary positions."""
    both = known.get("rope_parameters")
    newer, older = both if both is not None else {FULL: {"rope_type": "default"}}, known.get("rope_scaling")
    for key in (FULL, SLIDING):
        if not isinstance(newer.get(key, {}), dict | None):
            raise refuse("rope_parameters", f"cannot be read: its {key} is not an object")
    if older is not None and newer.get(FULL) is None:
        raise refuse("rope_scaling", f"cannot be expressed: it changes rope_parameters, which has no {FULL}")
    bases = defaults.table()["gemma3_text"]["theta"]
    far = {"rope_theta": known.get("rope_theta", bases["global"])} | (newer.get(FULL) or {}) | (older or {})
    near = {"rope_theta": known.get("rope_local_base_freq", bases["local"])} | (newer.get(SLIDING) or {})
    where = "rope_parameters" if both else "rope_scaling"
    ways = [_way(one, where, refuse) for one in (far, near)]
    if ways[0] not in ("default", "linear") or ways[1] != "default":
        raise refuse(where, "cannot be expressed: only linear scaling of the global layers can")
    if known.get("partial_rotary_factor") not in (1, None):
        raise refuse("partial_rotary_factor", "cannot be expressed: all of a head's width turns")
    return {"global_every": global_every(known, known.get("sliding_window_pattern", 6), refuse),
            "rope_theta": float(far["rope_theta"]), "local_rope_theta": float(near["rope_theta"]),
            "rope_factor": float(far["factor"]) if ways[0] == "linear" else 1.0}


def olmo_layers(known: Keys, refuse: Refuse) -> Keys:
    """Return OLMo 3's keys of local and global layers and their rotary positions, of which only global ones scale."""
    both, older = known.get("rope_parameters"), known.get("rope_scaling")
    newer = both if both is not None else {FULL: {"rope_type": "default"}}  # which outdoes the older word, `type`
    for key in (FULL, SLIDING):
        if not isinstance(newer.get(key), dict | None):
            raise refuse("rope_parameters", f"cannot be read: its {key} is not an object")
    if newer.keys() - {FULL, SLIDING}:
        raise refuse("rope_parameters", f"cannot be read: it is not made of {FULL} and {SLIDING}")
    if older is not None and both is not None and newer.get(FULL) is None:
        raise refuse("rope_scaling", f"cannot be expressed: it changes rope_parameters, which has no {FULL}")
    base = defaults.table()["olmo3"]["theta"]  # a file's rope_theta is that of global layers alone
    far = {"rope_theta": known.get("rope_theta", base)} | (newer.get(FULL) or {}) | (older or {})
    near = {"rope_theta": base} | (newer.get(SLIDING) or {})
    if _way(near, "rope_parameters", refuse) != "default":
        raise refuse("rope_parameters", "cannot be expressed: only rotary positions of global layers are scaled")
    without = {key: value for key, value in known.items() if key not in ("rope_scaling", "rope_theta")}
    return {"global_every": global_every(known, 4, refuse), "local_rope_theta": float(near["rope_theta"])} | rotary(
        "olmo3", without | {"rope_parameters": far}, refuse)


def published_olmo_layers(c: RotaryConfig, local_theta: float) -> Keys:
    """Return OLMo 3's keys of rotary positions in a config.json."""
    far = published_rotary(c)
    return {"rope_parameters": {
        FULL: {"rope_type": "default", "rope_theta": far["rope_theta"]} | (far["rope_scaling"] or {}),
        SLIDING: {"rope_type": "default", "rope_theta": local_theta}}}


def published_rotary(c: RotaryConfig) -> Keys:
    """Return the keys of rotary positions in a config.json."""
    plain = {"rope_theta": c.rope_theta, "rope_scaling": None}
    if c.rope_short_factor:
        return plain | {"rope_scaling": {
            "rope_type": "longrope", "original_max_position_embeddings": c.rope_original_len,
            "short_factor": c.rope_short_factor, "long_factor": c.rope_long_factor,
            "attention_factor": c.rope_turn_factor}}
    if c.rope_scaling == 1:
        return plain
    if c.rope_type == "ntk":  # another base, and nothing else
        width = c.rotary_width
        return plain | {"rope_theta": c.rope_theta * c.rope_scaling ** (width / (width - 2))}
    scaling = {"rope_type": c.rope_type, "factor": c.rope_scaling}
    if c.rope_type not in _WITHOUT_LENGTH:
        scaling["original_max_position_embeddings"] = c.rope_original_len
    zero_is_none = {key: getattr(c, f"rope_{key}") for key in _SCALINGS[c.rope_type]}
    return plain | {"rope_scaling": scaling | {key: value for key, value in zero_is_none.items()
                                               if value or key == "truncate"}}

"""Rotary positions of Hunyuan's models, whose fixed `alpha` is a factor of the base, to our keys and back."""

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.hf import defaults
from jaxtrain.hf.hf_format import Keys, Refuse
from jaxtrain.hf.rotary_keys import published_rotary, rotary


def alpha_rotary(kind: str, known: Keys, refuse: Refuse) -> Keys:
    """Return our keys of rotary positions: those of the type `dynamic` with an `alpha` are `ntk` here."""
    where = "rope_scaling" if known.get("rope_scaling") else "rope_parameters"
    scaling = known.get(where) or {}
    if scaling.get("rope_type", scaling.get("type")) != "dynamic" or not scaling.get("alpha"):
        return rotary(kind, known, refuse)
    if defaults.misfit(alpha := scaling["alpha"], ["float"]) or alpha < 1:
        raise refuse(where, "cannot be expressed: its alpha is not a number of 1 or more")
    plain = {key: value for key, value in known.items() if key not in ("rope_scaling", "rope_parameters")}
    base = {key: value for key, value in scaling.items() if key in ("rope_theta", "partial_rotary_factor")}
    found = rotary(kind, plain | {"rope_parameters": {"rope_type": "default"} | base}, refuse)
    return found if alpha == 1 else found | {"rope_type": "ntk", "rope_scaling": float(alpha)}


def published_alpha_rotary(c: RotaryConfig) -> Keys:
    """Return the keys of rotary positions in a config.json."""
    if c.rope_scaling == 1 or c.rope_type != "ntk":
        return published_rotary(c)
    return {"rope_theta": c.rope_theta, "rope_scaling": {"rope_type": "dynamic", "alpha": c.rope_scaling,
                                                         "factor": 1.0}}

"""Mamba-2 in published models: the keys of config.json and the tensors of a layer."""

import math

from jaxtrain.config.hybrids.state_space_config import StateSpaceConfig
from jaxtrain.hf.decoder_tensors import HEADS, OUT
from jaxtrain.hf.hf_format import Entry, Keys, Refuse

# Published key -> ours, of the hybrids that call them so.
KEYS = {"mamba_n_heads": "state_heads", "mamba_n_groups": "state_groups", "mamba_d_state": "state_dim",
        "mamba_d_conv": "conv_width", "mamba_conv_bias": "conv_bias", "mamba_proj_bias": "state_bias"}


def steps(known: Keys, refuse: Refuse) -> Keys:
    """Return the limits of steps."""
    key, given = "time_step_limit", known["time_step_limit"]
    if given is None or len(given) != 2 or any(math.isnan(limit) for limit in given):
        raise refuse(key, "cannot be expressed: it is not two numbers")
    least, largest = given
    if largest <= 0 or largest < least or least == math.inf:
        raise refuse(key, "cannot be expressed: no step is within these limits")
    return {"least_step": max(float(least), 0.0), "largest_step": 0.0 if math.isinf(largest) else float(largest)}


def published_steps(c: StateSpaceConfig) -> Keys:
    """Return the key of the limits of steps, where there are any."""
    if not (c.least_step or c.largest_step):
        return {}
    return {"time_step_limit": [c.least_step, c.largest_step or math.inf]}


def expanded(known: Keys, refuse: Refuse, expand: str, heads: str = "mamba_n_heads",
             head_dim: str = "mamba_d_head") -> Keys:
    """Return the width of a head, of files that say by which factor all heads are wider than the embedding."""
    return width_of(known, refuse, expand, known[expand] * known["hidden_size"], heads, head_dim)


def width_of(known: Keys, refuse: Refuse, key: str, width: int, heads: str = "mamba_n_heads",
             head_dim: str = "mamba_d_head") -> Keys:
    """Return the width of a head, where that of all heads follows from a key."""
    count, each = known[heads], known[head_dim]
    if each == "auto":
        each = width // count if count else 0
    if type(each) is not int or each * count != width or width < 1:
        raise refuse(key, f"cannot be expressed: {heads} times {head_dim} is not the width that it gives")
    return {"state_head_dim": each}


def expansion(c: StateSpaceConfig) -> int:
    """Return by which factor all heads together are wider than the embedding, rounded down."""
    return c.state_width // c.embed_dim


def layer(c: StateSpaceConfig, at: str, *, norm: bool = True, out_bias: bool | None = None) -> list[Entry]:
    """Return the entries of Mamba-2, of tensors below `at`. `out_bias`: None if it is as with other projections."""
    sizes = {"gate": c.state_width, "x": c.state_width, "B": c.state_groups * c.state_dim,
             "C": c.state_groups * c.state_dim, "dt": c.state_heads}
    found = _rows(sizes, f"{at}.in_proj", "kernel", "weight", HEADS, "hd->dh")
    found += _rows(sizes, f"{at}.in_proj", "bias", "bias", "(hk)->hk", "h->h") * c.state_bias
    convolved = {name: sizes[name] for name in ("x", "B", "C")}
    found += _rows(convolved, f"{at}.conv1d", "kernel", "weight", "(hk)pw->whk", "", "_conv")
    found += _rows(convolved, f"{at}.conv1d", "bias", "bias", "(hk)->hk", "", "_conv") * c.conv_bias
    out_bias = c.state_bias if out_bias is None else out_bias
    return [*found, Entry("attention/decay/rate", f"{at}.A_log"), Entry("attention/decay/bias", f"{at}.dt_bias"),
            Entry("attention/skip", f"{at}.D"),
            *[Entry("attention/norm/scale", f"{at}.norm.weight", "(hk)->hk")] * norm,
            Entry("attention/out/kernel", f"{at}.out_proj.weight", OUT),
            *[Entry("attention/out/bias", f"{at}.out_proj.bias")] * out_bias]


def _rows(sizes: dict[str, int], theirs: str, ours: str, end: str, layout: str, of_heads: str,
          part: str = "") -> list[Entry]:
    """Return the entries of parts of these sizes that one tensor holds in this order."""
    begins = {name: sum([*sizes.values()][:n]) for n, name in enumerate(sizes)}
    return [Entry(f"attention/{name}{part}/{ours}", f"{theirs}.{end}", of_heads if name == "dt" else layout,
                  rows=(begins[name], sum(sizes.values()))) for name in sizes]

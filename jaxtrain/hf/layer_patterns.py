"""The layers of published models that have an attention window, and those that have experts, to our keys and back."""

from collections.abc import Mapping

from jaxtrain.config.hybrids.layer_pattern import repeated
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.hf.hf_format import Keys, Refuse

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
_OLDER_NAMES = {"attention": FULL, "mamba": LINEAR}


def global_every(known: Keys, usual: int, refuse: Refuse) -> int:
    """Return every how many layers one is global."""
    count = known["num_hidden_layers"]
    if usual < 1:
        raise refuse("sliding_window_pattern", "is not positive")
    if known.get("layer_types") is None:
        return usual
    layers = listed(known, refuse)
    every = usual if layers == layer_types(usual, count) else layers.index(FULL) + 1 if FULL in layers else count + 1
    if layers != layer_types(every, count):
        raise refuse("layer_types", "cannot be expressed: only every N-th layer can be global")
    return every


def window_of_some(known: Keys, refuse: Refuse, every: int) -> int:
    """Return the window of the layers that are not global; of none of them (`every` is 1) whatever a file says."""
    window = known["sliding_window"]
    if window is None and every == 1:
        return known["max_position_embeddings"]
    if window is None or window < 1:
        raise refuse("sliding_window", "is not a size that a window has")
    return window


def window_everywhere(known: Keys, refuse: Refuse, window: int | None) -> int:
    """Return the window of all layers, whatever a file calls them; 0: none."""
    if window is not None and window < 1:
        raise refuse("sliding_window", "is not a size that a window has")
    if known.get("layer_types") is not None:
        listed(known, refuse)
    return window or 0


def late_window(known: Keys, refuse: Refuse) -> Keys:
    """Return the window of a Qwen2 or Qwen3, which its first layers may be without."""
    window = known["sliding_window"] if known["use_sliding_window"] else None
    if window is not None and window < 1:
        raise refuse("sliding_window", "is not a size that a window has")
    if window is None and known["layer_types"] is None:
        return {"window": 0}
    before = first_window(known, refuse)
    if before == known["num_hidden_layers"]:
        return {"window": 0}
    if window is None:
        raise refuse("layer_types", "cannot be expressed: it has layers with a window, and there is no window")
    return {"window": window} | ({"global_first": before} if before else {})


def first_window(known: Keys, refuse: Refuse) -> int:
    """Return how many layers of a Qwen2 or Qwen3 are before those with a window."""
    count = known["num_hidden_layers"]
    if known.get("layer_types") is None:
        return min(max(known["max_window_layers"], 0), count)
    layers = listed(known, refuse)
    first = layers.index(SLIDING) if SLIDING in layers else count
    if layers != [FULL] * first + [SLIDING] * (count - first):
        raise refuse("layer_types", "cannot be expressed: only the first layers may have no window")
    return first


def listed(known: Keys, refuse: Refuse) -> list[str]:
    """Return the kinds of layers that a file lists."""
    layers = [_OLDER_NAMES.get(name, name) for name in known["layer_types"]]
    if {*layers} - {FULL, SLIDING}:
        raise refuse("layer_types", "cannot be expressed: layers attend to everything or have a window")
    if len(layers) != known["num_hidden_layers"]:
        raise refuse("layer_types", f"does not have one for each of num_hidden_layers={known['num_hidden_layers']}")
    return layers


def layer_types(every: int, layers: int) -> list[str]:
    """Return the kinds of layers of which every so many the last one is global."""
    return [FULL if (n + 1) % every == 0 else SLIDING for n in range(layers)]


def pattern(known: Keys, refuse: Refuse, letters: Mapping[str, str], key: str = "layer_types") -> Keys:
    """Return the pattern of a hybrid's layers; `letters`: of each kind, by its published name."""
    listed = [_OLDER_NAMES.get(name, name) for name in known[key]]
    if {*listed} - letters.keys():
        raise refuse(key, f"cannot be expressed: it has other kinds of layers than {', '.join(letters)}")
    if len(listed) != known["num_hidden_layers"]:
        raise refuse(key, f"does not have one for each of num_hidden_layers={known['num_hidden_layers']}")
    return {"layer_pattern": repeated("".join(letters[name] for name in listed))}


def published_pattern(kinds: str, letters: Mapping[str, str]) -> list[str]:
    """Return the published names of layers of these kinds."""
    names = {letter: name for name, letter in letters.items()}
    return [names[letter] for letter in kinds]


def routed(known: Keys, refuse: Refuse) -> tuple[int, int]:
    """Return Qwen3's number of dense layers before those with experts, and every how many of the rest one has them."""
    count, every, dense = known["num_hidden_layers"], known["decoder_sparse_step"], {*(known["mlp_only_layers"] or ())}
    if every < 1:
        raise refuse("decoder_sparse_step", "is not positive")
    sparse = [n not in dense and (n + 1) % every == 0 for n in range(count)]
    first = sparse.index(True) + 1 - every if True in sparse else 0
    if sparse != [n >= first and (n + 1) % every == 0 for n in range(count)] or (count - first) % every:
        raise refuse("mlp_only_layers" if dense else "decoder_sparse_step", "cannot be expressed: only the first "
                     "layers may be dense, and of the others only every N-th layer can have experts")
    return first, every


def sparse_layers(sparse: list[bool], key: str, refuse: Refuse, usual: int = 1) -> tuple[int, int]:
    """Return the number of dense layers before those with experts, and every how many of the rest one has them.

    Args:
        sparse: which layers have experts.
        key: of config.json, that says so.
        usual: every how many layers one has experts, if that fits.
    """
    count, found = len(sparse), [n for n, one in enumerate(sparse) if one]
    if found == list(range(usual - 1, count, usual)) and count % usual == 0:
        return 0, usual
    if not found:
        raise refuse(key, "cannot be expressed: no layer has experts")
    every = found[1] - found[0] if len(found) > 1 else 1
    first = found[0] + 1 - every
    if first < 0 or (count - first) % every or found != list(range(found[0], count, every)):
        raise refuse(key, "cannot be expressed: only the first layers may be dense, and of the others only every N-th "
                     "layer can have experts")
    return first, every


def listed_mlps(known: Keys, refuse: Refuse, dense: int = 1) -> Keys:
    """Return our keys of layers with experts, which `mlp_layer_types` lists; `dense`: first ones without, if not."""
    count, kinds = known["num_hidden_layers"], known["mlp_layer_types"]
    kinds = ["dense" if n < dense else "sparse" for n in range(count)] if kinds is None else kinds
    if len(kinds) != count or {*kinds} - {"dense", "sparse"}:
        raise refuse("mlp_layer_types", "cannot be read: it does not say dense or sparse of each layer")
    first, every = sparse_layers([kind == "sparse" for kind in kinds], "mlp_layer_types", refuse)
    return {"dense_layers": first, "experts_every": every}


def published_mlps(c: ModelConfig) -> list[str]:
    """Return what `mlp_layer_types` says of a model."""
    first, every = c.experts.dense_layers, c.experts.every
    return ["sparse" if n >= first and (n + 1 - first) % every == 0 else "dense" for n in range(c.num_layers)]

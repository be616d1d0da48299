"""The published format of a family: what its config.json says, and the tensor of each parameter.

One declaration serves both directions. A layout such as "(hk)d->dhk" says that the published matrix has heads times
head width as its rows, and that the parameter has the dimensions d, h and k; letters in parentheses are one dimension.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError

Keys = dict[str, Any]
Refuse = Callable[[str, str], UserError]  # (key of config.json, why) -> the error
# Allowed values of keys, since they are what our model does; the first one is the default, and what is written.
NO, SILU = (False, None), ("silu", "swish")
BIASES: dict[str, tuple] = {"attention_bias": NO, "mlp_bias": NO, "hidden_act": SILU}
# Published key -> ours, of most decoders.
WITHOUT_EPSILON: dict[str, str] = {
    "vocab_size": "vocab_size", "num_hidden_layers": "num_layers", "hidden_size": "embed_dim",
    "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads", "head_dim": "head_dim",
    "intermediate_size": "mlp_dim", "max_position_embeddings": "max_seq_len",
    "tie_word_embeddings": "tied_embeddings"}
COMMON: dict[str, str] = WITHOUT_EPSILON | {"rms_norm_eps": "norm_eps"}


@dataclass(frozen=True)
class Entry:
    """A parameter and the tensor that holds it, or the tensors of its layers and experts.

    Args:
        ours: the parameter's path.
        theirs: the tensor's name, with {layer} and {expert} for those that the parameter stacks.
        layout: from the tensor's dimensions to those of one layer's, or one expert's, parameter.
        part: which one of how many equal parts that the tensor holds along the dimension p of the layout.
        rows: where the parameter begins along the tensor's first dimension, and how long that is, where the tensor
            holds several parameters of unequal sizes one after the other; None: it holds the whole dimension.
        stretches: of how many equal parts of the first dimension, one after the other, `rows` are said; the layout's
            first letter counts them.
        paired: how many of the last entries of the parameter's last dimension are rotary, whose pairs are neighbours in
            the tensor and halves apart in the parameter.
        paired_first: whether those are the first entries, not the last ones.
        layers: the published numbers of the layers that the parameter stacks; None: it is not of a layer.
        experts: how many experts it stacks; 0: it is not of an expert.
        float32: whether it is written in float32 whatever the others are, as published.
        copy: whether another tensor holds the parameter, of which this one is a copy.
        cut: sizes into which the parameter's dimensions are cut where the tensor has others; None: it has the same.
    """

    ours: str
    theirs: str
    layout: str = "d->d"
    part: tuple[int, int] = (0, 1)
    rows: tuple[int, int] | None = None
    stretches: int = 1
    paired: int = 0
    paired_first: bool = False
    layers: Sequence[int] | None = None
    experts: int = 0
    float32: bool = False
    copy: bool = False
    cut: tuple[int, ...] | None = None


def _nothing(*_: object) -> Keys:
    return {}


def _always(_: object) -> bool:
    return True


def _same_name(_: object, name: str) -> str:
    return name


OwnName = Callable[[Any, str], str]  # a config of a family and a tensor's name in transformers -> that in files


def renaming(patterns: Mapping[str, str]) -> OwnName:
    """Return what replaces these regular expressions in the name of a tensor, for `HFTensors.own_name`."""
    def own_name(_: object, name: str) -> str:
        for pattern, new in patterns.items():
            name = re.sub(pattern, new, name)
        return name

    return own_name


def _never(*_: object) -> bool:
    return False


@dataclass(frozen=True)
class HFConfig:
    """The config.json of one published model type.

    Args:
        model_type: as config.json names it.
        architecture: the class that transformers has for it.
        keys: published key -> ours, of values that are equal.
        like: the model type that `hf/defaults.json` has whose keys, with their types and defaults, this one has too;
            "": the file has the type itself, or config.json has to give all of `keys` that `defaults` lacks.
        defaults: the values of keys that a config.json may leave out, where they are not those of `like`.
        fixed: the values that other keys may have, see `BIASES`.
        read: returns further keys of ours, from all of config.json with the defaults of the type.
        write: returns further keys of config.json, from our config; they replace those of `keys` and `fixed`.
        describes: whether a config of the family is written as this type; the first of a family's types that says so
            counts.
        nested: the model type of files that have this one in their `text_config`; "": none.
        classifier: the class of transformers for a reward model; "": it is named like the architecture; None: there
            is none.
        quantized: the method of quantization whose packed weights are read; "": none.
        unpublished: our keys that the type has no word for, and that only shape training or the preparation of data.
        own_read: reads config.json in place of all above, for types that share no keys with others.
        own_write: writes it.
        beside: returns keys of ours that other files of the folder say, from config.json, the folder and our keys.
    """

    model_type: str
    architecture: str
    keys: Mapping[str, str] = field(default_factory=dict)
    like: str = ""
    defaults: Keys = field(default_factory=dict)
    fixed: Mapping[str, tuple] = field(default_factory=lambda: BIASES)
    read: Callable[[Keys, Refuse], Keys] = _nothing
    write: Callable[[Any], Keys] = _nothing
    describes: Callable[[Any], bool] = _always
    nested: str = ""
    classifier: str | None = ""
    quantized: str = ""
    unpublished: tuple[str, ...] = ()
    own_read: Callable[[Keys, Path], Keys] | None = None
    own_write: Callable[[Any], Keys] | None = None
    beside: Callable[[Keys, Path, Keys], Keys] = _nothing


@dataclass(frozen=True)
class HFTensors:
    """The tensors of a family's published models.

    Args:
        entries: returns the entry of every parameter of a config; the second argument says whether the model has a
            reward head in place of the output projection.
        prefix: how the names of a language model's tensors begin, which files of the bare model leave out; "": names
            are taken as they are.
        own_name: returns the name that a tensor has in `entries`, from a config and a name that it has in some files,
            where that is another one.
        turned: whether matrices are [in, out] and not [out, in].
        further_layers: whether files have layers after the last one, of multi-token prediction, which a model does
            without unless it predicts further tokens itself.
        unread: whether files may have a tensor of this name although the model of a config has no parameter for it.
    """

    entries: Callable[[Any, bool], list[Entry]]
    prefix: str = "model."
    own_name: OwnName = _same_name
    turned: bool = False
    further_layers: bool = False
    unread: Callable[[Any, str], bool] = _never

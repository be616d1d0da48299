"""The policies of `train.remat`: which results of a layer are kept for its backward pass, by name and by layer."""

import re
from dataclasses import dataclass

from jaxtrain.errors import UserError, nearest

KEY = "train.remat"
PRESETS = ("none", "full", "dots", "attention", "attention_and_dots")
AUTO = "auto"  # the planner chooses, in `plan.preflight`; until then it counts as `full`, which takes least
STATES = "recurrent_states"  # what layers with states keep, in place of attention's results
_HOST = "@host"


@dataclass(frozen=True)
class Policy:
    """The results that some layers keep: all of them, or only these kinds."""

    # "attention" (and states), "dots" (of all products, and what is named so because it serves gradients in a product's
    # place or takes next to no memory), STATES, or the logical axis that a product results in.
    names: tuple[str, ...]
    hosted: tuple[str, ...] = ()  # of products, moved to the host's memory meanwhile
    everything: bool = False

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of what stays on the device: with attention's results go states, which layers have in its place."""
        return (*self.names, STATES) if "attention" in self.names else self.names

    @property
    def keeps_products(self) -> bool:
        """Whether no product is computed twice."""
        return self.everything or "dots" in self.names


def policies(remat: str, layers: int) -> list[tuple[Policy, int]]:
    """Return what the layers keep, in order, and how many layers each policy is for.

    "attention:52,attention_and_dots" is one policy for the first 52 layers and another for the rest.
    """
    *counted, last = remat.split(",")
    found = []
    for text in counted:
        name, _, count = text.partition(":")
        if not count.isdecimal() or int(count) < 1:
            raise UserError(KEY, f"{text!r} does not say for how many layers", f"write {name}:NUMBER,POLICY")
        found.append((policy(name), int(count)))
    left = layers - sum(count for _, count in found)
    name, _, count = last.partition(":")
    if left < 1 or (count and count != f"{left}"):
        raise UserError(KEY, f"the numbers in {remat!r} do not add up to the {layers} stacked layers of the model",
                        "leave out the last one, which is for the rest, and count model.experts_every layers as one")
    return [*found, (policy(name), left)]


def policy(text: str) -> Policy:
    """Return one policy: a preset, or names joined by "+", of which some end in "@host"."""
    if text in (*PRESETS, AUTO):
        names = {"none": (), "full": (), AUTO: (), "attention_and_dots": ("attention", "dots")}.get(text, (text,))
        return Policy(names, everything=text == "none")
    words = text.split("+")
    if not all(re.fullmatch(rf"[a-z_]+({_HOST})?", word) for word in words):
        raise UserError(KEY, f"{text!r} is not supported", nearest(text, (*PRESETS, AUTO)))
    hosted = tuple(word.removesuffix(_HOST) for word in words if word.endswith(_HOST))
    if wrong := [name for name in hosted if name in ("attention", "dots", *PRESETS)]:
        raise UserError(KEY, f"{wrong[0]}{_HOST} is not the result of one product", "name a logical axis: mlp@host")
    kept = tuple(word for word in words if not word.endswith(_HOST))
    if wrong := [name for name in kept if name in (AUTO, "none", "full", "attention_and_dots")]:
        raise UserError(KEY, f"{wrong[0]!r} is not a name to be joined with others",
                        "join attention, dots and logical axes")
    return Policy(kept, hosted)

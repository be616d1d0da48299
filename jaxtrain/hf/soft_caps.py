"""Soft caps as published models declare them, to our keys and back: null there is 0 here."""

from jaxtrain.hf.hf_format import Keys, Refuse

LOGITS, SCORES = "final_logit_softcapping", "attn_logit_softcapping"
_OURS = {LOGITS: "logit_cap", SCORES: "attention_cap"}


def soft_caps(known: Keys, refuse: Refuse, *names: str) -> Keys:
    """Return our keys of these soft caps."""
    for name in names:
        if known[name] is not None and known[name] <= 0:
            raise refuse(name, "is not a cap: it is not positive")
    return {_OURS[name]: float(known[name] or 0) for name in names}


def published_soft_caps(c: object, *names: str) -> Keys:
    """Return these soft caps as a config.json has them."""
    return {name: getattr(c, _OURS[name]) or None for name in names}

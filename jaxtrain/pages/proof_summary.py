"""The summary of a certificate of `jaxtrain prove` as a sentence."""

from jaxtrain.base.annotations import JsonObject


def in_words(proof: JsonObject) -> str:
    """Return one sentence on the summary of a certificate, for reports and model cards."""
    code, config = (f"{proof.get(key, '')}"[:12] for key in ("code", "config"))
    worst = proof.get("worst", 0)
    worst = f"{worst:.2g}" if isinstance(worst, int | float) else "unknown"
    return (f"On {proof.get('layouts', 0)} layouts of devices, {proof.get('steps', 0)} steps have the numbers of one "
            f"device (worst error {worst} of the tolerance; jaxtrain prove, code {code}, config "
            f"{config})")

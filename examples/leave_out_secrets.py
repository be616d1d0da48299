"""A step of one's own for `prepare`: leaves out documents with private keys or access tokens in them.

jaxtrain prepare --input=jaxtrain --output=corpora/safe --filters examples.leave_out_secrets:step pii

Safety filters come this way. One that needs a model is a class or a function that is given what stands behind `=` and
gives the step back: `--filters mypackage.safety:Classifier=model.bin` loads it once a task.
"""

import re

from jaxtrain.data.formats.inputs import Text

SECRET = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----|\bAKIA[0-9A-Z]{16}\b|\bghp_[0-9A-Za-z]{36}\b")


def step(document: Text) -> Text | str:
    """The document, or why it is left out."""
    return "a private key or token" if SECRET.search(document.content) else document

"""XLA_FLAGS that jaxlib does not know: it ends the process that reads them, so another process reads them first."""

import os
import re
import warnings

from jaxtrain.errors import UserError

FIX = "leave it out of XLA_FLAGS, or see how this version spells it"


def check_xla_flags() -> None:
    """Refuse flags that jaxlib does not take. Call it before JAX is imported, while the process has one thread."""
    if not os.environ.get("XLA_FLAGS"):
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # as JAX does, which is imported after jaxlib here
    from jaxlib import xla_client

    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy's threads, which hold no lock that the child needs
        child = os.fork()
    if not child:
        os.dup2(write, 2)
        xla_client.CompileOptions()  # reads XLA_FLAGS
        os._exit(0)
    os.close(write)
    with open(read, "rb") as said:
        text = said.read().decode(errors="replace")
    if os.waitpid(child, 0)[1] == 0:
        return
    if unknown := unknown_flags(text):
        raise UserError("XLA_FLAGS", f"this jaxlib does not know {', '.join(unknown)} and ends every program", FIX)
    reason = text.strip().splitlines()[:1] or ["it says nothing"]
    raise UserError("XLA_FLAGS", f"this jaxlib ends when it reads them ({reason[0].partition('] ')[2] or reason[0]})",
                    "correct them")


def unknown_flags(stderr: str) -> list[str]:
    """Return those of XLA_FLAGS that this jaxlib refuses."""
    said = re.search(r"Unknown flags? in XLA_FLAGS: *(.*)", stderr)
    return re.findall(r"--[\w-]+", said[1]) if said else []

"""The assignment of this machine's GPUs to trials, so that trials that run at the same time share none."""

from collections.abc import Iterable, Sequence

from jaxtrain.errors import UserError

VARIABLE = "CUDA_VISIBLE_DEVICES"


def check(gpus: Sequence[str], parallel: int, each: int) -> None:
    """Refuse more trials at a time than there are devices for, and trials that would share all of them."""
    if gpus and not each and parallel > 1:
        raise UserError("job.accelerators_per_node", f"{parallel} trials at a time would share {len(gpus)} GPUs",
                        "say how many each of them gets")
    if each and len(gpus) < parallel * each:
        raise UserError("parallel", f"{parallel} trials at a time with {each} GPUs each need {parallel * each}, and "
                        f"there are {len(gpus)}", "give fewer")


def assigned(gpus: Sequence[str], taken: Iterable[str], each: int) -> str:
    """Return the devices of a trial, as CUDA_VISIBLE_DEVICES names them; `taken`: those of the trials that run."""
    used = {gpu for devices in taken for gpu in devices.split(",")}
    free = [gpu for gpu in gpus if gpu not in used]
    if len(free) < each:
        raise UserError("parallel", f"of {len(gpus)} GPUs {len(free)} are free, and a trial needs {each}",
                        "wait until the trials that run have ended, or give fewer")
    return ",".join(free[:each])

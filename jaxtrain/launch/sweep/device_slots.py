"""Which GPUs of this machine a trial gets, so that trials that run side by side share none."""

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


def assigned(gpus: Sequence[str], taken: Iterable[str], each: int) -> dict[str, str]:
    """Return the variable that gives a trial its devices; `taken`: what those that run were given."""
    if not each:
        return {}
    used = {gpu for value in taken for gpu in value.split(",")}
    free = [gpu for gpu in gpus if gpu not in used]
    assert len(free) >= each, "there are more trials than devices"
    return {VARIABLE: ",".join(free[:each])}

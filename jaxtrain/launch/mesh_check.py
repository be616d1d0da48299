"""Whether the machines of a job suit its config: as many accelerators as the mesh asks for, with room for a step."""

import math

from jaxtrain.config import remat_policies
from jaxtrain.config.hybrid_mesh import with_hybrid_mesh
from jaxtrain.config.schema import AXES, Config
from jaxtrain.errors import UserError
from jaxtrain.launch.cost import target_of
from jaxtrain.launch.job_spec import JobSpec

_COUNTS = 16  # numbers of nodes from min_nodes on that are looked at, at most


def check_mesh(config: Config, spec: JobSpec) -> list[int]:
    """Refuse machines whose accelerators are not as many as the mesh asks for; of CPUs it is not known here.

    Returns: numbers of nodes from min_nodes to nodes with which the run can go on; none where all will do.
    """
    from jaxtrain.plan import elastic

    if not (each := spec.devices_per_node) or config.mesh.auto:
        return []
    config = with_hybrid_mesh(config, spec.nodes * each, each)
    sizes = [getattr(config.mesh, axis) for axis in AXES]
    if config.resilience.elastic:
        least, fits = spec.min_nodes or spec.nodes, []
        for nodes in sorted({least, spec.nodes, *range(least, spec.nodes, 1 + (spec.nodes - least) // _COUNTS)}):
            try:
                elastic.choose(config, nodes * each, spec.nodes * each)
                fits.append(nodes)
            except UserError as error:
                if nodes in (least, spec.nodes):
                    raise UserError(error.key, f"with {nodes} nodes of {each} devices: {error.reason}",
                                    error.fix) from error
        return fits if len(fits) <= spec.nodes - least else []
    asked, given = math.prod(size for size in sizes if size != -1), spec.nodes * each
    if given % asked if -1 in sizes else given != asked:
        raise UserError("nodes", f"{spec.nodes} x {spec.accelerators_per_node} accelerators are {given} devices, and "
                        f"the mesh ({elastic.words(tuple(sizes))}) asks for {'a multiple of ' * (-1 in sizes)}{asked}",
                        f"set nodes={asked // each}" if asked % each == 0 else
                        "set other mesh axes" if -1 in sizes else "set one mesh axis to -1, or others")
    return []


def memory_warning(config: Config, spec: JobSpec) -> str:
    """Return what the planner says of a step that does not fit the accelerators; "": it fits, or it cannot be told."""
    target = target_of(spec)
    if target is None or config.mesh.auto or config.train.remat == remat_policies.AUTO:  # it chooses what fits
        return ""
    from jaxtrain.plan import elastic
    from jaxtrain.plan.estimate import estimate
    from jaxtrain.plan.targets import gigabytes

    devices = spec.nodes * spec.devices_per_node
    config = with_hybrid_mesh(config, devices, spec.devices_per_node)
    try:
        guess = estimate(elastic.choose(config, devices, devices), target, devices)
    except Exception as error:  # a prediction that fails stops no job
        return f"its memory is not predicted: {f'{error}'.splitlines()[0] if f'{error}' else type(error).__name__}"
    part, size = guess.memory.most_common(1)[0]
    return "" if guess.fits else (
        f"warning: a step is predicted to take {gigabytes(guess.bytes)} GB of a device's {gigabytes(target.room)} GB "
        f"({target.name}), {gigabytes(size)} GB of it {part}; see what fits: jaxtrain plan --target={target.name}"
        f"x{guess.devices}")

"""Checks of a job's machines against its config: a mesh that fits, a batch that divides, room for a step."""

import math
from dataclasses import replace

from jaxtrain.config import data_stages, remat_policies
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
        if not (config.mesh.auto or config.mesh.hsdp or config.resilience.elastic):
            _check_batch(config, spec, spec.processes)  # a process has one CPU device, or several: a multiple of this
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
    _check_batch(config, spec, each)
    return []


def check_resumed(config: Config, spec: JobSpec, nodes: int) -> None:
    """Refuse a number of nodes on which a job with this config cannot go on."""
    check_mesh(config, replace(spec, nodes=nodes, min_nodes=0, topology=""))


def _check_batch(config: Config, spec: JobSpec, each: int) -> None:
    """Refuse a number of nodes over whose devices a batch does not divide, and name those nearest to it that do."""
    from jaxtrain.plan import elastic
    from jaxtrain.sharding.mesh import axis_sizes

    sizes = tuple(getattr(config.mesh, axis) for axis in AXES)
    batches = sorted({stage.batch for stage in data_stages.stages(config.data)})

    def parts(nodes: int) -> int:
        """Return into how many parts a batch is cut; 0: the mesh does not fit."""
        asked = math.prod(size for size in sizes if size != -1)
        if (nodes * each) % asked or (-1 not in sizes and nodes * each != asked):
            return 0
        return elastic.batch_shards(config, axis_sizes(sizes, nodes * each)) * config.train.accumulation

    def fits(nodes: int) -> bool:
        return bool(count := parts(nodes)) and not any(batch % count for batch in batches)

    if not (given := parts(spec.nodes)) or fits(spec.nodes):
        return
    wrong = next(batch for batch in batches if batch % given)
    below = next((nodes for nodes in range(spec.nodes - 1, 0, -1) if fits(nodes)), 0)
    above = next((nodes for nodes in range(spec.nodes + 1, 2 * spec.nodes + 1) if fits(nodes)), 0)
    near = " or ".join(f"nodes={nodes}" for nodes in (below, above) if nodes)
    raise UserError("nodes", f"on {spec.nodes} machines the mesh and train.accumulation="
                    f"{config.train.accumulation} cut a batch into {given} parts, which do not divide "
                    f"data.global_batch_size={wrong}", f"set {near}" if near else
                    f"make the batch a multiple of {given}")


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

"""The size of what is proven: few rows of few tokens, and narrower layers where a config's model is large."""

import dataclasses
import itertools

import jax

from jaxtrain.base.annotations import Json, JsonMapping, JsonObject, PyTree
from jaxtrain.config.schema import Config
from jaxtrain.doctor import machine
from jaxtrain.errors import UserError
from jaxtrain.plan.estimate import change
from jaxtrain.proof import hard_batches
from jaxtrain.proof.drawn_layouts import Layout
from jaxtrain.proof.trial import Subject
from jaxtrain.run import Run, shapes_of

ROWS, SEQ = 32, 32  # that eight devices and four micro-batches divide; every device of `context` has several tokens
MOST = 2_000_000  # parameters, beyond which layers are made narrower
_EXPERTS = 16  # in a layer, of a model with more
_FEW_LAYERS = 6  # that are compiled apart from each other; of more, only a scan is compiled


def of(config: Config, parts: JsonMapping, precision: str) -> tuple[Subject, JsonObject]:
    """Return what is proven in place of a config of any size, and the keys that were changed for it."""
    own = parts.get("model") is not None
    wanted: JsonObject = {"train.precision": precision} | length(config)
    if not own:
        wanted |= {"data.global_batch_size": ROWS, "data.seq_len": min(SEQ, config.data.seq_len),
                   "data.stages": [], "optimizer.warmup_steps": 0, "train.init_from": "", "train.init_encoder_from": ""}
        wanted |= {"train.unroll": 1} if config.model.num_layers > _FEW_LAYERS else {}
    changed = {key: value for key, value in wanted.items() if _value(config, key) != value}
    try:
        small = Subject(change(config, changed), parts)
    except UserError:  # rows of some kinds have a length of their own
        changed.pop("data.seq_len", None)
        small = Subject(change(config, changed), parts)
    if own:
        return small, changed
    narrower = _narrower(small)
    return Subject(change(small.config, narrower), parts), changed | narrower


def length(config: Config) -> JsonObject:
    """Return the keys of a run with a length in steps, for which no data are read."""
    return {"train.epochs": 0.0, "train.steps": 100} if config.train.epochs else {}


def batches_of(run: Run, steps: int, seed: int) -> list[PyTree]:
    """Return the batches of the steps: those of `data=`, or else random ones that are hard on purpose."""
    c = run.config
    if run.data is not None or run.own is not None:
        return [dict(run.batch_source[step]) for step in range(steps)]
    return [hard_batches.batch_of(shapes_of(run).spec.arrays, seed + step, ROWS, c.data.seq_len, c.model.vocabulary)
            for step in range(steps)]


def check_memory(run: Run, batch: PyTree) -> None:
    """Refuse a run of which one step takes more than half of the memory that this machine has left."""
    program = run.sharded.compiled(batch).memory_analysis()
    left = machine.here().free
    if program is not None and left and program.temp_size_in_bytes > left / 2:
        raise UserError("memory", f"one step of the proof takes {program.temp_size_in_bytes / 2**30:.0f} GiB, and "
                        f"{left / 2**30:.0f} are left here", "set train.remat=full, fewer model.num_layers or shorter "
                        "rows, or take another machine")


def _narrower(subject: Subject) -> JsonObject:
    """Return the keys of a model whose layers are as narrow as they can be, if it is large; all layers are kept."""
    if parameters(subject) <= MOST:
        return {}
    model = subject.config.model
    sizes = {field.name: value for field in dataclasses.fields(model)
             if isinstance(value := getattr(model, field.name), int) and value > 8}
    widths = {name: value for name, value in sizes.items() if name.endswith(("_dim", "_rank", "vocab_size"))}
    experts = {"model.num_experts": _EXPERTS} if sizes.get("num_experts", 0) > _EXPERTS else {}
    for times, fewer in itertools.product((64, 32, 16, 8, 4, 2), (experts, {})):
        keys = fewer | {f"model.{name}": _narrow(name, value // times) for name, value in widths.items()}
        if keys["model.embed_dim"] < SEQ:
            continue
        try:
            parameters(Subject(change(subject.config, keys), subject.parts))
        except UserError:  # some families' widths depend on each other
            continue
        return keys
    return {}


def _narrow(name: str, width: int) -> int:
    """Return about this width, which eight devices divide; the width of a head, which none do, is even."""
    return max(2, width // 2 * 2) if "head" in name else max(8, round(width / 8) * 8)


def parameters(subject: Subject) -> int:
    """Return how many parameters a model has."""
    return sum(leaf.size for leaf in jax.tree.leaves(subject.build(Layout()).abstract.all_params))


def _value(config: Config, key: str) -> Json:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)

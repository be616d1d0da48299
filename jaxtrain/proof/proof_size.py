"""The size of what is proven: few rows of few tokens, and narrower layers where a config's model is large."""

from jaxtrain.base.annotations import Json, JsonMapping, JsonObject, PyTree
from jaxtrain.config.schema import Config
from jaxtrain.plan.estimate import change
from jaxtrain.proof import hard_batches
from jaxtrain.proof.trial import Subject
from jaxtrain.run import Run, shapes_of

ROWS, SEQ = 32, 32  # that eight devices and four micro-batches divide; every device of `context` has several tokens


def of(config: Config, parts: JsonMapping, precision: str) -> tuple[Subject, JsonObject]:
    """Return what is proven in place of a config of any size, and the keys that were changed for it."""
    own = parts.get("model") is not None
    wanted: JsonObject = {"train.precision": precision}
    if not own:
        wanted |= {"data.global_batch_size": ROWS, "data.seq_len": min(SEQ, config.data.seq_len),
                   "optimizer.warmup_steps": 0}
    changed = {key: value for key, value in wanted.items() if _value(config, key) != value}
    return Subject(change(config, changed), parts), changed


def batches_of(run: Run, steps: int, seed: int) -> list[PyTree]:
    """Return the batches of the steps: those of `data=`, or else random ones that are hard on purpose."""
    c = run.config
    if run.data is not None or run.own is not None:
        return [dict(run.batch_source[step]) for step in range(steps)]
    return [hard_batches.batch_of(shapes_of(run).spec.arrays, seed + step, ROWS, c.data.seq_len, c.model.vocabulary)
            for step in range(steps)]


def _value(config: Config, key: str) -> Json:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)

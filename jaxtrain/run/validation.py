"""Checks of config combinations that cannot work: one table, evaluated before tracing, shown in docs/parallelism.md.

Each row names the key, says when and why it is refused, and what is the nearest that works. There is also one general
rule, in `axis_rules.check_divides`: a size must be divisible by the mesh axes that shard it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jaxtrain.base.annotations import JsonObject
from jaxtrain.base.narrow_formats import BLOCKS
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError
from jaxtrain.kernels.attention import choose_backend
from jaxtrain.sharding import axis_rules, mesh_context
from jaxtrain.sharding.axis_rules import AnyMesh, Rules
from jaxtrain.train_step.precision import dtype_of

if TYPE_CHECKING:
    from jaxtrain.parallel import schedules


@dataclass(frozen=True)
class Layout:
    """A config on a mesh, and the numbers that decide what fits."""

    config: Config
    mesh: AnyMesh
    rules: Rules
    microbatches: int  # of a pipeline, per batch of train.accumulation; 1 without a pipeline

    @cached_property
    def shards(self) -> int:
        """The number of pieces into which a batch is cut."""
        return axis_rules.shards(self.rules.batch, self.mesh)

    @cached_property
    def context(self) -> int:
        """The number of pieces into which a sequence is cut."""
        return axis_rules.shards(self.rules["seq"], self.mesh)

    @cached_property
    def heads(self) -> int:
        """The number of attention heads on a device."""
        return self.config.model.num_heads // axis_rules.shards(self.rules["act_heads"], self.mesh)

    @cached_property
    def rows(self) -> int:
        """The rows of a device's batch, per step of train.accumulation."""
        return self.config.data.global_batch_size // self.config.train.accumulation // self.shards

    @cached_property
    def tokens(self) -> int:
        """The tokens that a device processes at a time."""
        return self.rows // self.microbatches * self.config.data.seq_len // self.context

    @cached_property
    def wrong_chunks(self) -> Any:
        """The reason why the schedule cannot have its chunks, and what to do; None if it can."""
        c = self.config.pipeline
        if self.mesh.shape["stage"] == 1 or c.table:
            return None
        most = max(2, self.config.model.staged_layers)
        more = f"{c.chunks} chunks on a stage are more than there are layers", f"use {most} or fewer"
        from jaxtrain.parallel import schedules

        return schedules.wrong_chunks(c.schedule, c.chunks) or (more if c.chunks > most else None)

    @cached_property
    def idle(self) -> list[str]:
        """The mesh axes that no rule names."""
        named = {axis for axes in self.rules.table.values() for axis in axes}
        return [axis for axis, size in self.mesh.shape.items() if size > 1 and axis not in named]


class Refused(UserError):
    """Raised when a row of the table refuses a config."""


@dataclass(frozen=True)
class Refusal:
    """One row of the table.

    `reason` and `fix` are shown to the user; `example` is refused and, with `instead` applied, works.
    """

    key: str
    combination: str
    applies: Callable[[Layout], Any]
    reason: Callable[[Layout], str]
    fix: Callable[[Layout], str]
    example: dict[str, Any]
    instead: dict[str, Any]


TABLE = (
    Refusal("mesh.AXIS", "a mesh axis that no rule names",
            lambda a: a.idle,
            lambda a: f"no rule uses it: its {a.mesh.shape[a.idle[0]]} devices would repeat the same work",
            lambda a: "set it to 1 or use mesh.rules=fsdp_tp",
            {"mesh.rules": "fsdp", "mesh.tensor": 2}, {"mesh.rules": "fsdp_tp"}),
    Refusal("data.global_batch_size", "a batch that does not divide over data x fsdp x expert x train.accumulation",
            lambda a: a.config.data.global_batch_size % (a.shards * a.config.train.accumulation),
            lambda a: f"{a.config.data.global_batch_size} does not divide over {a.shards} batch shards x "
                      f"train.accumulation={a.config.train.accumulation}",
            lambda a: f"make it a multiple of {a.shards * a.config.train.accumulation}",
            {"data.global_batch_size": 6, "mesh.data": 4}, {"data.global_batch_size": 8}),
    Refusal("pipeline.microbatches", "micro-batches that do not divide a device's part of the batch",
            lambda a: a.rows % a.microbatches,
            lambda a: f"{a.microbatches} does not divide the {a.rows} rows of a device's batch",
            lambda a: "choose a divisor, or 0",
            {"mesh.stage": 2, "pipeline.microbatches": 3}, {"pipeline.microbatches": 4}),
    Refusal("pipeline.chunks", "a schedule with another number of chunks than it has",
            lambda a: a.wrong_chunks,
            lambda a: a.wrong_chunks[0],
            lambda a: a.wrong_chunks[1],
            {"mesh.stage": 2, "pipeline.schedule": "1f1b", "pipeline.chunks": 2}, {"pipeline.schedule": "interleaved"}),
    Refusal("pipeline.recompute", "results that stages keep on hosts",
            lambda a: a.mesh.shape["stage"] > 1 and not a.config.pipeline.recompute and "@host" in a.config.train.remat,
            lambda a: f"train.remat={a.config.train.remat} keeps results on hosts, and with pipeline.recompute=false a "
                      "stage keeps its results on the device",
            lambda a: "leave @host out, or use pipeline.recompute=true",
            {"mesh.stage": 2, "pipeline.recompute": False, "train.remat": "attention+mlp@host"},
            {"train.remat": "attention+mlp"}),
    Refusal("pipeline.recompute", "stages that keep everything, in fp8",
            lambda a: a.mesh.shape["stage"] > 1 and not a.config.pipeline.recompute and a.config.train.remat == "none"
            and a.config.train.precision == "fp8",
            lambda a: "with train.remat=none a stage would keep weights of 8 bits for each micro-batch",
            lambda a: "use train.remat=attention_and_dots, or pipeline.recompute=true",
            {"mesh.stage": 2, "pipeline.recompute": False, "train.precision": "fp8"},
            {"train.remat": "attention_and_dots"}),
    Refusal("train.loss_chunks", "chunks of the loss that do not divide the tokens that pass a device at a time",
            lambda a: a.config.train.loss_chunks and a.tokens % a.config.train.loss_chunks,
            lambda a: f"{a.config.train.loss_chunks} does not divide the {a.tokens} tokens of a device's micro-batch"
                      + (f" with pipeline.microbatches={a.microbatches}" if a.microbatches > 1 else ""),
            lambda a: "choose a divisor, or 0",
            {"train.loss_chunks": 7}, {"train.loss_chunks": 8}),
    Refusal("data.seq_len", "a sequence that does not divide into two chunks for each device of context",
            lambda a: a.context > 1 and a.config.data.seq_len % (2 * a.context),
            lambda a: f"{a.config.data.seq_len} does not divide into the {2 * a.context} chunks that "
                      f"mesh.context={a.context} assigns in pairs",
            lambda a: f"make it a multiple of {2 * a.context}",
            {"mesh.context": 4, "data.seq_len": 60}, {"data.seq_len": 64}),
    Refusal("data.seq_len", "blocks of tokens (MXFP8, NVFP4) that parts of a sequence do not hold whole",
            lambda a: a.context > 1 and a.config.data.seq_len % (2 * a.context * BLOCKS.get(
                a.config.train.precision, 1)),
            lambda a: f"{a.config.data.seq_len} does not divide into {2 * a.context} parts of whole blocks of "
                      f"{BLOCKS[a.config.train.precision]} tokens, as train.precision={a.config.train.precision} has",
            lambda a: f"make it a multiple of {2 * a.context * BLOCKS[a.config.train.precision]}",
            {"mesh.context": 2, "train.precision": "mxfp8", "data.seq_len": 64, "model.max_seq_len": 128},
            {"data.seq_len": 128}),
    Refusal("mesh.context_strategy", "ring attention inside a pipeline",
            lambda a: a.config.mesh.context_strategy == "ring" and a.context > 1 and a.mesh.shape["stage"] > 1,
            lambda a: f"ring's permutations would wait for all of mesh.stage={a.mesh.shape['stage']}, which are busy "
                      "with other things",
            lambda a: "use 'gather'",
            {"mesh.context": 2, "mesh.stage": 2, "mesh.context_strategy": "ring"}, {"mesh.context_strategy": "gather"}),
    Refusal("mesh.context_strategy", "ulysses with heads on a device that do not divide by context",
            lambda a: a.config.mesh.context_strategy == "ulysses" and a.heads % a.context,
            lambda a: f"ulysses gives each of mesh.context={a.context} devices a part of the {a.heads} heads, which do "
                      "not divide",
            lambda a: "use 'gather'" if a.mesh.shape["stage"] > 1 else "use 'ring'",
            {"mesh.context": 2, "mesh.tensor": 4, "mesh.context_strategy": "ulysses"},
            {"mesh.context_strategy": "ring"}),
    Refusal("train.remat", "several policies of rematerialization in a pipeline, or with layers in groups",
            lambda a: "," in a.config.train.remat and (a.mesh.shape["stage"] > 1 or a.config.model.period > 1),
            lambda a: f"mesh.stage={a.mesh.shape['stage']} gives every stage layers of all policies"
                      if a.mesh.shape["stage"] > 1 else "layers are stacked in groups, which have one policy",
            lambda a: f"use one policy, such as {a.config.train.remat.partition(':')[0]}",
            {"mesh.stage": 2, "train.remat": "full:1,none"}, {"train.remat": "full"}),
)


def check(config: Config, mesh: AnyMesh, rules: Rules, microbatches: int = 1, more: Sequence[Refusal] = ()) -> None:
    """Raise `Refused` for the first row that applies. `more`: the rows of the run's extensions."""
    layout = Layout(config, mesh, rules, microbatches)
    for row in (*TABLE, *more):
        if row.applies(layout):
            axis = layout.idle[0] if layout.idle else ""
            raise Refused(row.key.replace("AXIS", axis), row.reason(layout), row.fix(layout))


def checked_schedules(config: Config, mesh: AnyMesh, rules: Rules, precision: str, platform: str,
                      refusals: Sequence[Refusal] = ()) -> "tuple[schedules.Schedule, schedules.Schedule] | None":
    """Raise a UserError if a batch of the config's shape cannot be trained on; return the schedules of its pipeline.

    `refusals`: further rows of the table, of the run's extensions.

    Returns:
        one for training and one for evaluation; None without a pipeline.
    """
    stages, microbatches = mesh.shape["stage"], 1
    if stages > 1:
        from jaxtrain.parallel.pipeline.pipeline import count_microbatches

        rows = config.data.global_batch_size // config.train.accumulation // axis_rules.shards(rules.batch, mesh)
        microbatches = count_microbatches(config.pipeline, stages, rows)
    check(config, mesh, rules, microbatches, refusals)
    context, family = axis_rules.shards(rules["seq"], mesh), type(config.model)
    if not config.model.rows_cut and context > 1:
        more = f", or give {family.__name__} rows_cut = True if its model takes them in the order of parallel.context"
        raise UserError("mesh.context", f"{config.model.name} attends to later tokens too, and its rows are not cut",
                        f"set mesh.context=1{more * (family.rows_cut is ModelConfig.rows_cut)}")
    dtype, kind = dtype_of(precision), mesh_context.platform_of(mesh, platform).partition(":")[0]
    if context > 1:
        from jaxtrain.run.context_strategy import strategy

        strategy(config, mesh, rules, precision, platform)
    with mesh_context.use(mesh, rules, platform):
        for queries, keys, head_dim, causal in config.model.attentions(config.data.seq_len):
            # What looks both ways has all keys of a row on each device, where a mesh splits it.
            if not causal or context == 1:
                choose_backend(config.train.attention, kind, dtype, queries, head_dim,
                               soft_cap=config.model.attention_cap, packed=True, sinks=config.model.sinks,
                               key_len=keys or (queries if context > 1 else 0))
    if config.train.loss_kernel == "triton":
        from jaxtrain.kernels.loss_head import triton_logits

        with mesh_context.use(mesh, rules, platform):
            triton_logits.check(dtype, axis_rules.shards(rules["act_vocab"], mesh))
    if config.train.recurrent_kernel == "pallas":
        from jaxtrain.kernels.chunks import chunk_kernels

        with mesh_context.use(mesh, rules, platform):
            chunk_kernels.check(config.model)
    if config.model.experts.num or mesh.shape["expert"] > 1:
        from jaxtrain.parallel import experts

        experts.check(config.model, config.train, mesh, rules, dtype, platform)
    if stages == 1:
        return None
    from jaxtrain.parallel.pipeline.pipeline import make_schedules

    return make_schedules(config.pipeline, stages, microbatches)


def explains(error: UserError) -> bool:
    """Return whether a row, or the general rule about divisible sizes, is the reason for this error."""
    return isinstance(error, Refused) or "does not divide over mesh axes" in error.reason


def table(more: Sequence[Refusal]) -> str:
    """Return the table in Markdown, as in docs/parallelism.md, with the rows of all extensions."""
    def keys(overrides: JsonObject) -> str:
        return " ".join(f"`{key}={value}`" for key, value in overrides.items())

    rows = [f"| {row.combination} | `{row.key}` | {keys(row.example)} | {keys(row.instead)} |"
            for row in (*TABLE, *more)]
    return "\n".join(["| combination | key in the message | for example | nearest that works |", "|---|---|---|---|",
                      *rows])

"""Distillation: a student learns the next token and, beside it, the predictions of a larger, frozen teacher.

`jt.distillation` (tuning/teacher.py) makes this objective of a teacher's config.

The teacher runs forward before the student, spread over the mesh as it is; its logits exist for one chunk of tokens at
a time. Under a pipeline every stage runs the teacher's layers on the batch of its devices.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from flax import nnx

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.errors import UserError
from jaxtrain.kernels.loss_head.cross_entropy import distillation_loss
from jaxtrain.models.decoder import Compute, Decoder
from jaxtrain.models.make_model import make_model
from jaxtrain.objectives.next_token import NextToken
from jaxtrain.sharding.axis_rules import on_every_stage
from jaxtrain.train_step.state import Batch, Params, Skeleton

TEACHER = "teacher"  # the key of its parameters among the frozen ones


@dataclass(frozen=True, kw_only=True)
class Distillation(NextToken):
    """Cross-entropy and the divergence from a teacher's predictions."""

    teacher: Skeleton
    teacher_model: ModelConfig
    teacher_lora: LoraConfig
    compute: Compute
    soft: float
    temperature: float
    workdir: Path | None

    def prepare(self, params: Params, batch: Batch) -> tuple[Params, Batch]:
        """The student's parameters and the teacher's output projection; the batch with its final activations."""
        own, batch = super().prepare(params, batch)
        model = self.teacher.merge(params[TEACHER])
        x_BTD, _ = model.through(model.begin(batch["tokens"], batch["positions"]), batch["segments"],
                                 batch["positions"])
        head = {key: value for key, value in params[TEACHER].items() if key not in Decoder.STACKS}
        return own | {TEACHER: head}, batch | {TEACHER: jax.lax.stop_gradient(model.finish(x_BTD))}

    def head_loss(self, params: Params, x_BTD: jax.Array, head_DV: jax.Array,
                  batch: Batch) -> tuple[jax.Array, jax.Array]:
        """The summed loss of final activations, against tokens and teacher, and their cross-entropy alone."""
        student, teacher = self.model.merge(params), self.teacher.merge(params[TEACHER])
        return distillation_loss(
            x_BTD, head_DV, batch["targets"], batch["weights"], batch[TEACHER], teacher.head(), soft=self.soft,
            temperature=self.temperature, z_loss=self.z_loss, chunks=self.chunks,
            caps=(student.logit_cap, teacher.logit_cap))

    @property
    def evaluation(self) -> NextToken:
        """The cross-entropy alone, without the teacher."""
        return NextToken(self.model, self.chunks, cross_documents=self.cross_documents, penalties=False)

    @property
    def frozen_axes(self) -> dict:
        """The teacher's logical names. Its layers are not a stage's own: the student's layers are."""
        return {TEACHER: jax.tree.map(on_every_stage, self.teacher.axes(), is_leaf=lambda x: isinstance(x, tuple))}

    def frozen_metadata(self, key: str) -> dict:
        """Return the teacher's metadata: its routers compute in float32, whatever the precision."""
        return {TEACHER: self.teacher.metadata(key, "")}

    def init_frozen(self, key: jax.Array, params: Params) -> dict:
        """Return the teacher's initial parameters: a placeholder where it is loaded from a workdir."""
        model = make_model(self.teacher_model, self.compute, self.teacher_lora, rngs=nnx.Rngs(params=key))
        return {TEACHER: Skeleton.of(model).params()}

    def identity(self, recorded: JsonMapping) -> JsonObject:
        """Return what identifies the objective: its settings, the teacher's model and the checkpoint it comes from.

        A run keeps the teacher that it began with: its checkpoint stays the recorded one as long as the workdir given
        here is the same, or has it too.
        """
        lora = self.teacher_lora
        found = super().identity(recorded) | {
            "teacher": asdict(self.teacher_model) | ({"lora": asdict(lora)} if lora.rank else {})}
        if self.workdir is None:
            return found
        from jaxtrain.checkpoint.restore import find_good

        before = recorded.get("checkpoint")
        if before and before["workdir"] == str(self.workdir.absolute()):
            return found | {"checkpoint": before}
        if before and (there := find_good(self.workdir, before["step"])) and there[1] == before["fingerprint"]:
            return found | {"checkpoint": before}  # the same files, moved or copied
        newest = find_good(self.workdir)
        assert newest  # or it has raised
        step, fingerprint = newest
        return found | {"checkpoint": {"workdir": str(self.workdir.absolute()), "step": step,
                                       "fingerprint": fingerprint}}

    def load_frozen(self, abstract: dict, identity: JsonMapping) -> dict | None:
        """Return the teacher's parameters from the checkpoint that `identity` names."""
        if self.workdir is None:
            return None
        from jaxtrain.checkpoint.restore import find_good, load_params

        step, fingerprint = (identity["checkpoint"][key] for key in ("step", "fingerprint"))
        found = find_good(self.workdir, step)
        if not found or found[1] != fingerprint:
            raise UserError("teacher", f"{self.workdir} no longer has the checkpoint of step {step} that this run "
                            "began with", "bring it back, or begin with another teacher in another --workdir")
        return {TEACHER: load_params(self.workdir, abstract[TEACHER], step)}

"""Distillation: a student learns the next token and, beside it, the predictions of a larger, frozen teacher.

    run = jt.build(config, objective=distillation(teacher_config, workdir="runs/teacher"))

The teacher runs forward before the student, spread over the mesh as it is; its logits exist for one chunk of tokens at
a time. Under a pipeline every stage runs the teacher's layers on the batch of its devices.
"""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxtrain.config.data_stages import stages
from jaxtrain.config.load import load_config
from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError
from jaxtrain.kernels.cross_entropy import distillation_loss
from jaxtrain.models.decoder import Compute, Decoder
from jaxtrain.models.make_model import make_model
from jaxtrain.objectives.next_token import NextToken
from jaxtrain.objectives.objective import MakeObjective
from jaxtrain.sharding.rules import on_every_stage
from jaxtrain.train_step.state import Skeleton

TEACHER = "teacher"  # the key of its parameters among the frozen ones


@dataclass(frozen=True, kw_only=True)
class Distillation(NextToken):
    """Cross-entropy and the divergence from a teacher's predictions."""

    teacher: Skeleton
    teacher_config: Config
    compute: Compute
    soft: float
    temperature: float
    workdir: Path | None

    def prepare(self, params: Any, batch: Any) -> tuple[Any, Any]:
        """The student's parameters and the teacher's output projection; the batch with its final activations."""
        own, batch = super().prepare(params, batch)
        model = self.teacher.merge(params[TEACHER])
        x_BTD, _ = model.through(model.begin(batch["tokens"], batch["positions"]), batch["segments"],
                                 batch["positions"])
        head = {key: value for key, value in params[TEACHER].items() if key not in Decoder.STACKS}
        return own | {TEACHER: head}, batch | {TEACHER: jax.lax.stop_gradient(model.finish(x_BTD))}

    def head_loss(self, params: Any, x_BTD: jax.Array, head_DV: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
        """The summed loss of final activations, against tokens and teacher, and their cross-entropy alone."""
        return distillation_loss(
            x_BTD, head_DV, batch["targets"], batch["weights"], batch[TEACHER],
            self.teacher.merge(params[TEACHER]).head(), soft=self.soft, temperature=self.temperature,
            z_loss=self.z_loss, chunks=self.chunks)

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

    def init_frozen(self, key: jax.Array, params: Any) -> dict:
        """Return the teacher's initial parameters: a placeholder where it is loaded from a workdir."""
        model = make_model(self.teacher_config.model, self.compute, self.teacher_config.lora, rngs=nnx.Rngs(params=key))
        return {TEACHER: Skeleton.of(model).params()}

    def identity(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Return what identifies the objective: its settings, the teacher's model and the checkpoint it comes from.

        A run keeps the teacher that it began with: its checkpoint stays the recorded one as long as the workdir given
        here is the same, or has it too.
        """
        lora = self.teacher_config.lora
        found = super().identity(recorded) | {
            "teacher": asdict(self.teacher_config.model) | ({"lora": asdict(lora)} if lora.rank else {})}
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

    def load_frozen(self, abstract: dict, identity: Mapping[str, Any]) -> dict | None:
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


def distillation(teacher: Config, *, workdir: str | Path | None = None, soft: float = 0.5,
                 temperature: float = 1.0) -> MakeObjective:
    """Return a factory of distillation objectives: pass it to `build` as `objective`.

    Args:
        teacher: the config of the teacher, of which only the model is used.
        workdir: the workdir in which the teacher was trained; None: it keeps its initial parameters.
        soft: the share of the loss that is the divergence from the teacher; the rest is the cross-entropy.
        temperature: the divisor of both models' logits in the divergence.
    """
    if not 0 <= soft <= 1:
        raise UserError("soft", f"{soft} is not a share of the loss", "give a number from 0 to 1")
    if workdir is None:
        warnings.warn("distillation: the teacher keeps its initial parameters; workdir= names a run that trained it",
                      stacklevel=2)
    if not temperature > 0:
        raise UserError("temperature", f"{temperature} is not above 0", "give a number above 0, such as 1")

    def make(config: Config, model: Skeleton) -> Distillation:
        if teacher.model.vocabulary != config.model.vocabulary:
            raise UserError("model.vocab_size", f"the student has {config.model.vocabulary} and the teacher "
                            f"{teacher.model.vocabulary}", "use the same tokenizer and vocabulary for both")
        longest = max(stage.seq_len for stage in stages(config.data))
        if longest > teacher.model.max_seq_len:
            raise UserError("data.seq_len", f"rows of {longest} tokens exceed the teacher's model.max_seq_len="
                            f"{teacher.model.max_seq_len}", "use shorter rows or another teacher")
        if workdir is not None and (said := Path(workdir) / "config.json").is_file():
            before = load_config(said)
            adapters = before.lora
            if before.preference.reward_head:
                raise UserError("teacher", f"{workdir} has a reward model", "give a run that trained a language model")
            if adapters.rank and adapters != teacher.lora:
                raise UserError("teacher", f"{workdir} has adapters (lora.rank={adapters.rank}), and the teacher's "
                                "config has others or none", "give the config in that workdir")
        compute = replace(Compute.of(config), remat="none")
        skeleton = Skeleton.of(nnx.eval_shape(lambda: make_model(
            teacher.model, compute, teacher.lora, rngs=nnx.Rngs(params=jax.random.key(0)))))
        return Distillation(**vars(NextToken.of(config, model)), teacher=skeleton, teacher_config=teacher,
                            compute=compute, soft=soft, temperature=temperature,
                            workdir=None if workdir is None else Path(workdir))

    return make

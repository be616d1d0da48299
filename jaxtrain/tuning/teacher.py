"""The teacher of a distillation: its config and its workdir make an objective (objectives/distillation.py).

    run = jt.build(config, objective=distillation(teacher_config, workdir="runs/teacher"))
"""

import warnings
from dataclasses import replace
from pathlib import Path

import jax
from flax import nnx

from jaxtrain.config.data_stages import stages
from jaxtrain.config.load import load_config
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.schema import Config, DataConfig, MeshConfig, TrainConfig
from jaxtrain.errors import UserError
from jaxtrain.models.decoder import Compute
from jaxtrain.models.make_model import make_model
from jaxtrain.objectives.distillation import Distillation
from jaxtrain.objectives.next_token import NextToken
from jaxtrain.objectives.objective import MakeObjective
from jaxtrain.train_step.state import Skeleton


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

    def make(skeleton: Skeleton, *, model: ModelConfig, train: TrainConfig, data: DataConfig,
             mesh: MeshConfig) -> Distillation:
        if teacher.model.vocabulary != model.vocabulary:
            raise UserError("model.vocab_size", f"the student has {model.vocabulary} and the teacher "
                            f"{teacher.model.vocabulary}", "use the same tokenizer and vocabulary for both")
        longest = max(stage.seq_len for stage in stages(data))
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
        compute = replace(Compute.of(model, train, mesh), remat="none")
        of_teacher = Skeleton.of(nnx.eval_shape(lambda: make_model(
            teacher.model, compute, teacher.lora, rngs=nnx.Rngs(params=jax.random.key(0)))))
        student = NextToken.of(skeleton, model=model, train=train, data=data)
        return Distillation(**vars(student), teacher=of_teacher, teacher_model=teacher.model,
                            teacher_lora=teacher.lora, compute=compute, soft=soft, temperature=temperature,
                            workdir=None if workdir is None else Path(workdir))

    return make

"""The sections of a config that are for tuning a trained model: adapters, preferences, rewards, and tasks."""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from jaxtrain.config.field_checks import not_negative, one_of, positive
from jaxtrain.errors import UserError

# The keys that each loss of preferences reads.
PREFERENCE_LOSSES = {"dpo": "beta label_smoothing reference", "robust": "beta label_smoothing reference",
                     "ipo": "beta reference", "hinge": "beta reference", "simpo": "beta label_smoothing margin",
                     "orpo": "beta", "reward": "margin center",
                     "kto": "beta desirable_weight undesirable_weight reference"}


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of low rank beside frozen linear layers (docs/tuning.md); none by default."""

    rank: int = 0  # rank of the adapters, the only parameters that are trained; 0: no adapters
    alpha: float = 16.0  # adapters are multiplied by alpha / rank
    rank_stabilized: bool = False  # multiply by alpha / sqrt(rank) instead, so that higher ranks learn as fast
    # the linear layers that get adapters, by paths with wildcards
    targets: list[str] = field(default_factory=lambda: ["*"], hash=False)
    experts: bool = False  # also add adapters to routed experts
    dora: bool = False  # DoRA: adapters change the direction of columns; their lengths are trained separately
    quantize: str = ""  # quantization of frozen linear layers: int8 or nf4 (QLoRA); "": none

    def __post_init__(self):
        not_negative(self, "lora", "rank")
        positive(self, "lora", "alpha")
        _unread(self, "lora", self.rank, "rank above 0", "alpha rank_stabilized targets experts dora quantize")
        one_of("lora.quantize", self.quantize, ("", "int8", "nf4"))
        if not self.targets or not all(isinstance(pattern, str) for pattern in self.targets):
            raise UserError("lora.targets", f"{self.targets} is not a list of paths",
                            "give ['*'] for all linear layers")


@dataclass(frozen=True)
class PreferenceConfig:
    """Learning from pairs of a chosen and a rejected answer, or from labels (docs/tuning.md); off by default."""

    loss: str = ""  # dpo, robust, ipo, hinge, simpo, orpo, reward (a reward model) or kto; "": next-token prediction
    beta: float = 0.1  # higher values keep the policy closer to the reference
    label_smoothing: float = 0.0  # dpo, robust, simpo: the share of pairs that may be swapped
    margin: float = 0.0  # simpo (per token), reward: the margin by which the chosen answer's reward should be higher
    center: float = 0.0  # reward: coefficient of the squared sum of both rewards, which keeps rewards centered at 0
    desirable_weight: float = 1.0  # kto: weight of desirable answers in the loss
    undesirable_weight: float = 1.0  # kto: weight of undesirable answers in the loss
    reference: str = "copy"  # the reference policy: a "copy", or its sums, "precomputed" at the start

    def __post_init__(self):
        one_of("preference.loss", self.loss, ("", *PREFERENCE_LOSSES))
        one_of("preference.reference", self.reference, ("copy", "precomputed"))
        positive(self, "preference", "beta")
        not_negative(self, "preference", "center desirable_weight undesirable_weight")
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError("preference.label_smoothing", f"{self.label_smoothing} is not in [0, 0.5)", "try 0.1")
        read = PREFERENCE_LOSSES.get(self.loss, "").split()
        for spec in fields(self)[1:]:
            if getattr(self, spec.name) != spec.default and spec.name not in read:
                raise UserError(f"preference.{spec.name}", f"preference.loss={self.loss!r} does not read it",
                                "leave it out, or choose another loss")

    @property
    def reward_head(self) -> bool:
        """Whether the model has a reward head in place of the output projection."""
        return self.loss == "reward"


# How tokens are weighed: each alike (DAPO), each answer alike (GRPO), or each alike and divided by a fixed length.
REINFORCE_LOSSES = ("dapo", "grpo", "dr_grpo")


@dataclass(frozen=True)
class ReinforceConfig:
    """Learning from rewards of the model's own answers (docs/reinforce.md); off by default."""

    prompts: str = ""  # JSON lines file, each line with a "prompt"; "": no reinforcement learning
    reward: str = ""  # FILE.py:FUNCTION(answer, record), model:WORKDIR of a reward model, or the URL of a scorer
    reward_timeout_s: float = 20.0  # seconds for a scorer to answer a request
    group_size: int = 8  # answers per prompt, whose rewards are compared with each other
    max_new_tokens: int = 64  # maximum number of tokens of an answer
    reuse: int = 1  # steps trained on the same answers before new ones are generated
    staleness: int = 0  # steps between generating answers and training on them, during which they are scored
    gather_weights: bool = False  # gather and cast weights once for all answers of a step, not for each token
    loss: str = "dapo"  # weights of tokens: "dapo": all equal; "grpo": answers equal; "dr_grpo": by a fixed length
    # subtracted from rewards: the group's "mean", that of the "others" (RLOO), or a head's "value" (PPO)
    baseline: str = "mean"
    # divisor of advantages: the deviation in the "group" (value: the batch), the "batch", or "none"
    scale: str = "group"
    gamma: float = 1.0  # value: discount of a reward for each token before it
    gae_lambda: float = 0.95  # value: 1 compares with the actual reward, 0 with the value of the next token
    value_loss: float = 0.1  # value: coefficient of the squared error of values
    value_clip: float = 0.2  # value: PPO clip range of values; 0: no clipping
    clip: float = 0.2  # lower PPO clip range of the probability ratio
    clip_high: float = 0.28  # upper PPO clip range (clip-higher); 0: same as clip
    ratio: str = "token"  # probability ratio: of each "token", or the geometric mean over a "sequence" (GSPO)
    kl: float = 0.0  # coefficient of the KL divergence from the initial policy; 0: no KL term

    def __post_init__(self):
        one_of("reinforce.loss", self.loss, REINFORCE_LOSSES)
        one_of("reinforce.baseline", self.baseline, ("mean", "others", "value"))
        one_of("reinforce.scale", self.scale, ("group", "batch", "none"))
        one_of("reinforce.ratio", self.ratio, ("token", "sequence"))
        positive(self, "reinforce", "max_new_tokens reuse clip value_loss")
        not_negative(self, "reinforce", "staleness clip_high kl value_clip")
        _unread(self, "reinforce", self.prompts or self.reward, "prompts", " ".join(
            field.name for field in fields(self) if field.name not in ("prompts", "reward")))
        _unread(self, "reinforce", "://" in self.reward, "reward=URL", "reward_timeout_s")
        _unread(self, "reinforce", self.value_head, "baseline=value", "gamma gae_lambda value_loss value_clip")
        for key in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, key) <= 1:
                raise UserError(f"reinforce.{key}", f"{getattr(self, key)} is not in [0, 1]", "try 0.95 or 1")
        if not 0 < self.reward_timeout_s <= 3600:
            raise UserError("reinforce.reward_timeout_s", f"{self.reward_timeout_s} is not in (0, 3600]", "try 20")
        if self.group_size < (1 if self.value_head else 2):
            raise UserError("reinforce.group_size", f"{self.group_size} answers cannot be compared with each other",
                            "give 2 or more, such as 8, or 1 with reinforce.baseline=value")
        if bool(self.prompts) != bool(self.reward):
            missing = "reward" if self.prompts else "prompts"
            raise UserError(f"reinforce.{missing}", "it is missing, and reinforcement learning needs both",
                            "give FILE.py:FUNCTION" if self.prompts else "give a file of JSON lines")

    @property
    def value_head(self) -> bool:
        """Whether the model has a value head beside the output projection."""
        return self.baseline == "value"


@dataclass(frozen=True)
class EvaluationConfig:
    """Tasks of lm-evaluation-harness that are run with each evaluation (docs/evaluate.md); none by default."""

    tasks: list[str] = field(default_factory=list, hash=False)  # names of tasks or of groups of tasks
    include: str = ""  # a folder with YAML files of your own tasks
    limit: int = 0  # number of questions of each task; 0: all
    num_fewshot: int = -1  # examples in front of each question; -1: as the task says
    chat: bool = False  # apply the chat template of the data to the questions
    batch_size: int = 64  # texts at once

    def __post_init__(self):
        not_negative(self, "evaluation", "limit")
        positive(self, "evaluation", "batch_size")
        _unread(self, "evaluation", self.tasks, "tasks", "include limit num_fewshot chat batch_size")


def _unread(section: Any, name: str, on: Any, key: str, others: str) -> None:
    """Refuse keys that nothing reads because the one that turns a section on is not set."""
    for other in () if on else others.split():
        spec = next(field for field in fields(section) if field.name == other)
        usual = spec.default if spec.default_factory is MISSING else spec.default_factory()
        if getattr(section, other) != usual:
            raise UserError(f"{name}.{other}", f"it is read with {name}.{key} only", f"set that too, or leave {name}."
                            f"{other} out")


def tuned_from_nothing(config: Any) -> str:
    """Return the key that tunes a model, of a config that names none to begin with; "" of any other config."""
    keys = {"lora.rank": config.lora.rank, "preference.loss": config.preference.loss,
            "reinforce.prompts": config.reinforce.prompts}
    return "" if config.train.init_from else next((key for key, value in keys.items() if value), "")


def check(config: Any) -> None:
    """Refuse a `Config` in which these sections do not go with the others."""
    if config.lora.quantize and config.train.trainable:
        raise UserError("lora.quantize", "train.trainable trains weights beside the adapters, and those in a few bits "
                        "cannot be trained", "leave one of them out")
    if config.lora.quantize and config.train.precision == "fp8":
        raise UserError("lora.quantize", "train.precision=fp8 rounds the weights of products itself",
                        "leave one of them out")
    if config.lora.rank and config.train.freeze:
        raise UserError("train.freeze", "with lora.rank everything is frozen but the adapters",
                        "leave it out; train.trainable names what is trained beside them")
    if config.lora.experts and not config.model.num_experts:
        raise UserError("lora.experts", f"model.name={config.model.name} has no experts", "leave it out")
    if config.lora.experts and config.lora.dora:
        raise UserError("lora.dora", "matrices of experts cannot have it", "leave out lora.experts or lora.dora")
    loss, packing = config.preference.loss, config.data.packing
    wanted, kind = ("answers", "answers with labels") if loss == "kto" else ("pairs", "preferences")
    if loss and packing != wanted:
        raise UserError("preference.loss", f"{loss} needs rows of whole {wanted}, not data.packing={packing}",
                        f"set data.packing={wanted} and data.source to a corpus of {kind}")
    if packing in ("pairs", "answers") and not loss:
        raise UserError("data.packing", f"{packing} hold rejected answers too, which next-token prediction would learn",
                        f"set preference.loss, such as {'dpo' if packing == 'pairs' else 'kto'}")
    _check_reinforce(config)
    if config.evaluation.tasks and (config.reinforce.prompts or loss == "reward"):
        raise UserError("evaluation.tasks", "a reward model has no logits" if loss else "a run on its own answers has "
                        "no evaluations", "leave them out" if loss else "use jaxtrain evaluate --watch")
    for key, value in (("data.cross_document_attention", config.data.cross_document_attention),
                       ("train.z_loss", config.train.z_loss),
                       ("train.sample_tokens", config.preference.reward_head and config.train.sample_tokens)):
        if loss and value:
            raise UserError(key, f"preference.loss={loss} does not support it", "leave it out")


def _check_reinforce(config: Any) -> None:
    c, data, train = config.reinforce, config.data, config.train
    if not c.prompts:
        return
    if config.preference.loss:
        raise UserError("preference.loss", "a run learns from preferences or from rewards", "leave out one of them")
    if data.global_batch_size % c.group_size:
        raise UserError("data.global_batch_size", f"{data.global_batch_size} answers are not whole groups of "
                        f"reinforce.group_size={c.group_size}", f"make it a multiple of {c.group_size}")
    if c.max_new_tokens >= data.seq_len:
        raise UserError("reinforce.max_new_tokens", f"{c.max_new_tokens} leaves no room for a prompt in data.seq_len="
                        f"{data.seq_len}", "raise data.seq_len, or ask for shorter answers")
    for key, value, wanted in (
            ("data.cross_document_attention", data.cross_document_attention, False), ("train.z_loss", train.z_loss, 0),
            ("data.mixture", data.mixture, {}), ("data.stages", data.stages, []),
            ("train.eval_every", train.eval_every, 0), ("data.packing", data.packing, "concat"),
            ("resilience.spikes", config.resilience.spikes == "rollback", False)):
        if value != wanted:
            raise UserError(key, "batches are made of the model's own answers",
                            "set --config.train.eval_every=0" if key == "train.eval_every" else "leave it out")

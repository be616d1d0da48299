"""The sections of a config that are for tuning a trained model: adapters, preferences, rewards, and tasks."""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from jaxtrain.config.field_checks import at_most, bounded, choice, number
from jaxtrain.errors import UserError

# The keys that each preference loss reads.
PREFERENCE_LOSSES = {"dpo": "beta label_smoothing rpo_alpha reference",
                     "robust": "beta label_smoothing rpo_alpha reference", "ipo": "beta rpo_alpha reference",
                     "hinge": "beta rpo_alpha reference", "apo_zero": "beta rpo_alpha reference",
                     "apo_down": "beta rpo_alpha reference", "simpo": "beta label_smoothing margin",
                     "orpo": "beta", "reward": "margin center",
                     "kto": "beta desirable_weight undesirable_weight reference"}
ENVIRONMENT = "environment"  # the reward that `rl.environment` gives, and the prompts that it brings itself
OF_ANSWERS = ("kto",)  # the losses of labelled answers and not of pairs, which compare those of the whole batch


@dataclass(frozen=True)
class LoraConfig:
    """LoRA: low-rank adapters of frozen linear layers (docs/tuning.md); off by default."""

    # rank of the LoRA adapters, which are the only trained parameters; 0: no adapters
    rank: int = at_most(0, 2**16, least=0)
    alpha: float = number(16.0, above=0)  # the output of adapters is multiplied by alpha / rank
    rank_stabilized: bool = False  # rsLoRA: multiply by alpha / sqrt(rank) instead, so that higher ranks learn as fast
    # linear layers that get adapters: paths with wildcards, or PEFT's names, such as q_proj, mlp.down_proj, all-linear
    targets: list[str] = field(default_factory=lambda: ["*"], hash=False)
    # what adapters begin with: "zero" (products of 0), or "pissa", the principal components of the weights
    init: str = choice("zero", "zero", "pissa")
    experts: bool = False  # also add adapters to the matrices of routed experts
    # dropout rate of the adapters' inputs in training
    dropout: float = number(0.0, least=0, below=1, fix="try 0.05")
    # DoRA: adapters change the direction of weight columns, and their magnitudes are trained separately
    dora: bool = False
    # quantization of the frozen linear layers: int8 or nf4 (QLoRA); "": none
    quantize: str = choice("", "", "int8", "nf4")

    def __post_init__(self):
        bounded(self, "lora")
        _unread(self, "lora", self.rank, "rank above 0", "alpha rank_stabilized targets init experts dropout dora "
                "quantize")
        for key in ("experts", "dora", "quantize") if self.init == "pissa" else ():
            if getattr(self, key):
                raise UserError("lora.init", f"pissa is not for adapters with lora.{key}", f"leave lora.{key} out, or "
                                "set lora.init=zero")
        if not self.targets or not all(isinstance(pattern, str) for pattern in self.targets):
            raise UserError("lora.targets", f"{self.targets} is not a list of paths",
                            "give ['*'] for all linear layers")


@dataclass(frozen=True)
class PreferenceConfig:
    """Learning from preferences: pairs of a chosen and a rejected answer, or labelled answers; off by default.

    See docs/tuning.md.
    """

    # preference loss, one of those below; "reward" trains a reward model; "": next-token prediction
    loss: str = choice("", "", *PREFERENCE_LOSSES)
    # strength of the regularization: higher values keep the policy closer to the reference
    beta: float = number(0.1, above=0)
    # dpo, robust, simpo: the assumed share of pairs whose labels are swapped
    label_smoothing: float = number(0.0, least=0, below=0.5, fix="try 0.1")
    # RPO: coefficient of the chosen answer's cross-entropy per token, which is added to the loss
    rpo_alpha: float = number(0.0, least=0)
    # simpo (per token), reward: the margin by which the chosen answer's reward should exceed the other's
    margin: float = 0.0
    # reward: coefficient of the squared sum of both rewards, which keeps rewards centred at 0
    center: float = number(0.0, least=0)
    desirable_weight: float = number(1.0, least=0)  # kto: loss weight of desirable answers
    undesirable_weight: float = number(1.0, least=0)  # kto: loss weight of undesirable answers
    # reference policy: a "copy" of the initial weights, or its log probabilities "precomputed" at the start
    reference: str = choice("copy", "copy", "precomputed")

    def __post_init__(self):
        bounded(self, "preference")
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
class RLConfig:
    """Reinforcement learning from rewards for the model's own answers (docs/rl.md); off by default."""

    # file of JSON lines with a "prompt" each; "": no reinforcement learning, or the tasks that rl.environment brings
    prompts: str = ""
    # reward function as FILE.py:FUNCTION(answer, record), reward model as model:WORKDIR, a scoring service's URL, or
    # the name of an environment of another package; several, separated by commas, are added
    reward: str = ""
    reward_weights: list[float] = field(default_factory=list, hash=False)  # weights of several rewards; []: 1 each
    # how several rewards become one advantage: "sum": of their weighted sum; "normalize": each is normalized in its
    # group before they are added (GDPO)
    combine: str = choice("sum", "sum", "normalize")
    # on-policy distillation: a workdir or published folder with the same tokenizer, or the URL of a server of such a
    # model, whose log-probability of each token less the policy's is added to the token's advantage; with it rl.reward
    # may be left out
    teacher: str = ""
    teacher_weight: float = number(1.0, above=0)  # coefficient of the teacher's advantages
    # an environment that the model talks to over several turns: FILE.py:CLASS, a URL, verifiers:NAME, openenv:NAME, or
    # the name of one of another package; it gives a reward, to which that of rl.reward is added
    environment: str = ""
    max_turns: int = at_most(8, 2**16, above=0)  # answers of the model in a conversation with an environment
    environment_workers: int = at_most(2, 2**10, above=0)  # processes in which an environment runs
    environment_memory_gib: float = number(8.0, least=0)  # address space of each of them, in GiB; 0: no limit
    # what follows if an environment fails at an answer: the run ends ("stop"), or the conversation does and is left out
    # of the loss ("mask")
    environment_errors: str = choice("stop", "stop", "mask")
    # Python whose packages an environment uses, such as VENV/bin/python; "": the one that runs jaxtrain
    environment_python: str = ""
    # what the answers of a conversation are credited with: each with the rewards of the whole "episode", or of its own
    # "turn" and of those after it
    credit: str = choice("episode", "episode", "turn")
    # seconds that a scoring service, a teacher's server or an environment may take for one request
    reward_timeout_s: float = number(20.0, above=0, most=3600.0, fix="try 20")
    # what answers: "": the model that is trained, on the mesh that trains it; or the URL of a vLLM server with the same
    # model, which is sent the weights, as http://HOST:PORT/v1 or http://HOST:PORT/v1#MODEL
    sampler: str = ""
    # how many devices generate answers while the others train: the last ones of the process, which are not in the
    # mesh; 0: none
    sampler_devices: int = at_most(0, 2**16, least=0)
    # with rl.sampler: seconds in which the answers of a step must come, restarts of the server included
    sampler_timeout_s: float = number(100.0, above=0, most=86400.0, fix="try 100")
    # with rl.sampler: folder for weights that the server sees too, such as one in /dev/shm; "": WORKDIR/sampler
    sampler_folder: str = ""
    group_size: int = at_most(8, 2**16)  # answers generated for each prompt; their rewards are compared with each other
    max_new_tokens: int = at_most(64, 2**24, above=0)  # maximum length of an answer in tokens
    # sampling temperature; the policy that is trained is the one at this temperature
    temperature: float = number(1.0, above=0)
    # leave answers that reach max_new_tokens without ending out of the loss; their rewards still count in the group
    mask_truncated: bool = False
    # number of tokens before max_new_tokens over which a growing penalty for length is subtracted from the reward;
    # 0: none
    overlong_buffer: int = at_most(0, 2**24, least=0)
    overlong_penalty: float = number(1.0, above=0)  # with overlong_buffer: penalty of an answer of max_new_tokens
    # times that answers are generated for a step at most, each time for other prompts, until groups with unequal
    # rewards fill it (dynamic sampling); 1: groups with equal rewards, which teach nothing, stay
    sampling_rounds: int = at_most(1, 2**10, above=0)
    reuse: int = at_most(1, 2**16, above=0)  # number of steps trained on the same answers before new ones are generated
    # steps between generating answers and training on them; scoring happens in the meantime
    staleness: int = at_most(0, 2**10, least=0)
    # the step draws the answers itself, of drafts by the sampler: its log-probabilities are the sampler's to the last
    # bit, for one more pass of the step or a few
    exact: bool = False
    replay_routes: bool = False  # tokens go to the experts that they went to when they were sampled
    gather_weights: bool = False  # gather and cast sharded weights once per generation phase, instead of for each token
    # how tokens are weighted: "dapo": all tokens equally; "grpo": all answers equally; "dr_grpo": tokens equally,
    # divided by a fixed length
    loss: str = choice("dapo", *REINFORCE_LOSSES)
    # baseline subtracted from rewards: the "mean" of the group, the mean of the "others" in it (RLOO), or the "value"
    # of a value head (PPO)
    baseline: str = choice("mean", "mean", "others", "value")
    # advantages are divided by the standard deviation in the "group" (with baseline=value: the batch) or the "batch",
    # or not at all: "none"
    scale: str = choice("group", "group", "batch", "none")
    # with baseline=value: discount factor of rewards, per token
    gamma: float = number(1.0, least=0, most=1.0, fix="try 0.95 or 1")
    # with baseline=value: lambda of generalized advantage estimation (GAE)
    gae_lambda: float = number(0.95, least=0, most=1.0, fix="try 0.95 or 1")
    value_loss: float = number(0.1, above=0)  # with baseline=value: coefficient of the value head's squared error
    value_clip: float = number(0.2, least=0)  # with baseline=value: clip range of the values' change; 0: no clipping
    # "ppo": the smaller of ratio and clipped ratio, times the advantage; "cispo": the clipped ratio weights the
    # gradient of each token's log-probability, so that no token is left out
    surrogate: str = choice("ppo", "ppo", "cispo")
    clip: float = number(0.2, above=0)  # PPO clip range, lower side
    clip_high: float = number(0.28, least=0)  # PPO clip range, upper side (clip-higher); 0: same as clip
    # probability ratio of each "token", or its geometric mean over the whole "sequence" (GSPO)
    ratio: str = choice("token", "token", "sequence")
    # correction for a sampler with other probabilities than the trainer: "": the clipped ratio alone; "truncate":
    # tokens weighted by the ratio of the two, at most correction_high; "mask": the same, and tokens with a ratio below
    # correction_low or above correction_high are left out
    correction: str = choice("", "", "truncate", "mask")
    correction_low: float = number(0.5, least=0, most=1.0, fix="try 0.5")  # with correction=mask: the least ratio
    correction_high: float = number(2.0, least=1.0, fix="try 2")  # with correction: the largest ratio
    kl: float = number(0.0, least=0)  # coefficient of the KL divergence from the initial policy; 0: no KL penalty
    # coefficient of the entropy of the policy's predictions, which is subtracted from the loss; 0: no bonus
    entropy: float = number(0.0, least=0)

    def __post_init__(self):
        bounded(self, "rl")
        if self.environment and not self.prompts:
            object.__setattr__(self, "prompts", ENVIRONMENT)
        _unread(self, "rl", self.teacher, "teacher", "teacher_weight")
        _unread(self, "rl", self.prompts or self.reward, "prompts", " ".join(
            field.name for field in fields(self) if field.name not in ("prompts", "reward")))
        _unread(self, "rl", "://" in self.reward + self.teacher or self.environment, "reward=URL, rl.teacher=URL or "
                "rl.environment", "reward_timeout_s")
        _unread(self, "rl", self.environment, "environment", "max_turns environment_workers environment_memory_gib "
                "environment_python environment_errors credit")
        _unread(self, "rl", self.sampler, "sampler", "sampler_timeout_s sampler_folder")
        _unread(self, "rl", len(self.rewards) > 1, "reward naming several", "reward_weights combine")
        _unread(self, "rl", self.overlong_buffer, "overlong_buffer", "overlong_penalty")
        _unread(self, "rl", self.surrogate == "ppo", "surrogate=ppo", "clip")
        _unread(self, "rl", self.correction, "correction", "correction_high")
        _unread(self, "rl", self.correction == "mask", "correction=mask", "correction_low")
        _unread(self, "rl", self.value_head, "baseline=value", "gamma gae_lambda value_loss value_clip")
        if self.group_size < (1 if self.value_head or (self.teacher and not self.rewards) else 2):
            raise UserError("rl.group_size", f"{self.group_size} answers cannot be compared with each other",
                            "give 2 or more, such as 8, or 1 with rl.baseline=value")
        if self.environment and self.overlong_buffer:
            raise UserError("rl.overlong_buffer", "conversations with rl.environment end by rl.max_turns or by the "
                            "environment", "leave it out, and let the environment reward short answers")
        if self.overlong_buffer and not self.reward:
            raise UserError("rl.overlong_buffer", "it is subtracted from rewards, and there are none",
                            "leave it out, or give rl.reward")
        if self.teacher and self.temperature != 1:
            raise UserError("rl.temperature", f"a teacher predicts at temperature 1, and answers are sampled at "
                            f"{self.temperature:g}", "leave it out, or leave out rl.teacher")
        if self.teacher and self.value_head and not self.rewards:
            raise UserError("rl.baseline", "a value head learns to expect rewards, and there is none",
                            "leave it out, or give rl.reward")
        if bool(self.prompts) != bool(self.rewards or self.teacher):
            missing = "reward" if self.prompts else "prompts"
            raise UserError(f"rl.{missing}", "it is missing, and reinforcement learning needs both",
                            "give FILE.py:FUNCTION, or rl.environment" if self.prompts else "give a file of JSON lines")

    @property
    def rewards(self) -> tuple[str, ...]:
        """The rewards by which answers are scored, one by one; the environment's own is the first."""
        return (*[ENVIRONMENT] * bool(self.environment),
                *filter(None, (one.strip() for one in self.reward.split(","))))

    @property
    def value_head(self) -> bool:
        """Whether the model has a value head beside the output projection."""
        return self.baseline == "value"


@dataclass(frozen=True)
class EvaluationConfig:
    """Tasks of lm-evaluation-harness that run with each evaluation (docs/evaluate.md); none by default."""

    tasks: list[str] = field(default_factory=list, hash=False)  # names of tasks or groups of tasks
    include: str = ""  # folder with YAML files of your own tasks
    limit: int = number(0, least=0)  # number of examples of each task; 0: all
    num_fewshot: int = -1  # few-shot examples before each question; -1: the task's own number
    chat: bool = False  # apply the chat template of the data to questions
    batch_size: int = at_most(64, 2**20, above=0)  # texts per batch

    def __post_init__(self):
        bounded(self, "evaluation")
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
            "rl.prompts": config.rl.prompts}
    return "" if config.train.init_from else next((key for key, value in keys.items() if value), "")


def check(config: Any) -> None:
    """Refuse a `Config` in which these sections do not go with the others."""
    if config.lora.quantize and config.train.trainable:
        raise UserError("lora.quantize",
                        "train.trainable trains weights in addition to the adapters, and quantized weights "
                        "cannot be trained", "leave one of them out")
    if config.lora.rank and config.train.freeze:
        raise UserError("train.freeze", "with lora.rank everything is frozen but the adapters",
                        "leave it out; train.trainable trains weights in addition to them")
    if config.lora.experts and not config.model.experts.num:
        raise UserError("lora.experts", f"model.name={config.model.name} has no experts", "leave it out")
    if config.lora.experts and config.lora.dora:
        raise UserError("lora.dora", "matrices of experts cannot have it", "leave out lora.experts or lora.dora")
    if config.lora.experts and config.lora.dropout:
        raise UserError("lora.dropout", "adapters of experts have none", "leave out lora.experts or lora.dropout")
    for key, value in (("lora.dropout", config.lora.dropout),
                       ("train.neftune_noise_alpha", config.train.neftune_noise_alpha)):
        if value and not config.model.text:
            raise UserError(key, f"model.name={config.model.name} is not a model of text alone", "leave it out")
    loss, packing = config.preference.loss, config.data.packing
    wanted, kind = ("answers", "answers with labels") if loss in OF_ANSWERS else ("pairs", "preferences")
    if loss and packing != wanted and not config.rl.prompts:
        raise UserError("preference.loss", f"{loss} needs rows of whole {wanted}, not data.packing={packing}",
                        f"set data.packing={wanted} and data.source to a corpus of {kind}")
    if packing in ("pairs", "answers") and not loss:
        raise UserError("data.packing", f"{packing} hold rejected answers too, which next-token prediction would learn",
                        f"set preference.loss, such as {'dpo' if packing == 'pairs' else OF_ANSWERS[0]}")
    if config.evaluation.tasks and (config.rl.prompts or loss == "reward"):
        raise UserError("evaluation.tasks", "a reward model has no logits" if loss else "a run on its own answers has "
                        "no evaluations", "leave them out" if loss else "use jaxtrain evaluate --watch")
    for key, value in (("data.cross_document_attention", config.data.cross_document_attention),
                       ("train.z_loss", config.train.z_loss),
                       ("train.sample_tokens", config.preference.reward_head and config.train.sample_tokens)):
        if loss and value:
            raise UserError(key, f"preference.loss={loss} does not support it", "leave it out")

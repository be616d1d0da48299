"""The schema: one frozen dataclass per section. A config file only fills it; the user's override always wins."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from jaxtrain.config import remat_policies
from jaxtrain.config.families import Gpt2Config, ModelConfig
from jaxtrain.config.field_checks import derive, not_negative, one_of, positive
from jaxtrain.config.sections import compression_keys, island_keys, sparsity_keys, tuning_keys
from jaxtrain.config.sections.compression_keys import CompressionConfig
from jaxtrain.config.sections.island_keys import IslandsConfig
from jaxtrain.config.sections.observe_keys import ObserveConfig
from jaxtrain.config.sections.sparsity_keys import SparsityConfig
from jaxtrain.config.sections.tuning_keys import EvaluationConfig, LoraConfig, PreferenceConfig, ReinforceConfig
from jaxtrain.errors import UserError
from jaxtrain.redaction import redacted

PRECISIONS = ("float32", "bfloat16", "float16", "fp8")
AXES = ("data", "fsdp", "stage", "context", "expert", "tensor")  # as in mesh.py, which imports JAX


@dataclass(frozen=True)
class MeshConfig:
    """The section `mesh`: the size of each axis (one may be -1: the rest), and the rules that map names to axes."""

    auto: bool = False  # the planner chooses the sizes; written mesh=auto
    hsdp: bool = False  # data parallelism across nodes and fsdp within a node; written mesh=hsdp
    data: int = -1  # data parallelism: replicas hold all parameters, unless optimizer.zero_stage shards them
    fsdp: int = 1  # fully sharded data parallelism: parameters are sharded, and gathered layer by layer
    stage: int = 1  # pipeline parallelism: each stage holds some of the layers
    context: int = 1  # context parallelism: each sequence is split among devices
    expert: int = 1  # expert parallelism: the experts are split among devices
    tensor: int = 1  # tensor parallelism: heads, MLPs and the vocabulary are split, and the sequence between them
    context_strategy: str = "auto"  # how attention communicates between the parts of a sequence
    rules: str = "fsdp_tp"  # how logical axis names map onto these axes: data, fsdp or fsdp_tp
    overrides: dict[str, str] = field(default_factory=dict, hash=False)  # logical name -> "axis", "a+b" or "none"

    def __post_init__(self):
        for axis in AXES:
            if (size := getattr(self, axis)) < 1 and size != -1:
                raise UserError(f"mesh.{axis}", f"{size} is not an axis size", "give a positive number or -1")
            if self.auto and size not in (1, -1):
                raise UserError(f"mesh.{axis}", f"{size} was given with mesh=auto", "leave one of them out")
        if [getattr(self, axis) for axis in AXES].count(-1) > 1:
            raise UserError("mesh", "more than one axis is -1", "give all axes but one a size")
        if self.hsdp and (self.auto or (self.data, self.fsdp) != (-1, 1)):
            raise UserError("mesh.hsdp", "mesh=hsdp chooses mesh.data and mesh.fsdp, but one of them, or mesh=auto, "
                            "was given too", "leave out either mesh=hsdp or those sizes")
        one_of("mesh.context_strategy", self.context_strategy, ("auto", "ring", "gather", "ulysses"))
        for name, axes in self.overrides.items():
            if not isinstance(axes, str):
                raise UserError(f"mesh.overrides.{name}", f"{axes!r} is not text", "give 'axis', 'a+b' or 'none'")


@dataclass(frozen=True)
class PipelineConfig:
    """The section `pipeline`: how micro-batches pass through the stages, where mesh.stage is more than 1."""

    schedule: str = "1f1b"  # the order of forward and backward passes of micro-batches
    microbatches: int = 0  # micro-batches of each batch, or of each train.accumulation part; 0: chosen, or the table's
    chunks: int = 0  # chunks of layers on each stage; 0: 2 for interleaved and zb_v, else 1, or the table's
    overlap: bool = False  # overlap transfers between stages with computation, at the price of a longer bubble
    table: str = ""  # a file with your own schedule, CSV or JSON

    def __post_init__(self):
        one_of("pipeline.schedule", self.schedule, ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"))
        not_negative(self, "pipeline", "microbatches chunks")
        if not self.table:
            derive(self, "chunks", 2 if self.schedule in ("interleaved", "zb_v") else 1)


@dataclass(frozen=True)
class DataConfig:
    """The section `data`: the source, its tokenizer, and the size and order of batches."""

    source: str = "stdlib"  # the running interpreter's own library; else a prepared corpus, or a file or folder of text
    tokenizer: str = "bytes"  # tokenizer of text that is not a prepared corpus
    # several sources instead of source: name -> {source, weight, epochs}
    mixture: dict[str, Any] = field(default_factory=dict, hash=False)
    stages: list[Any] = field(default_factory=list, hash=False)  # what changes at which step: docs/data-mixtures.md
    # "concat": documents end to end, cut at row ends; "best_fit": few are cut; "bucket": one per row, as for sequences
    # of a prepared corpus; "pairs", "answers": preference pairs or labelled answers, never cut.
    packing: str = "concat"
    buckets: list[int] = field(default_factory=list, hash=False)  # bucket lengths; none: chosen automatically
    crop: bool = False  # truncate sequences longer than seq_len; False: such sequences are an error
    cross_document_attention: bool = False  # attend across documents in a row, as many published recipes do
    seq_len: int = 256  # tokens in a row
    global_batch_size: int = 16  # rows in a step, over all devices
    seed: int = 0  # seed of the order of the data
    eval_fraction: float = 0.05  # fraction of the files held out for evaluation; a single file is split by position
    cache_dir: str = ""  # "": $JAXTRAIN_CACHE or ~/.cache/jaxtrain
    cache_bytes: int = 2**36  # maximum number of bytes of a corpus in object storage that are cached on disk
    corrupt: str = "fail"  # about corrupt data: fail, or "skip_and_count": affected rows carry no loss
    prefetch: int = 2  # batches prepared ahead, on a background thread
    # random augmentations of training images: "flip", "crop", "colour"
    augment: list[str] = field(default_factory=list, hash=False)

    def __post_init__(self):
        positive(self, "data", "seq_len global_batch_size prefetch")
        if not self.source:
            raise UserError("data.source", "it is empty", "name a folder or file of text, or a prepared corpus")
        if self.prefetch > 1000:
            raise UserError("data.prefetch", f"{self.prefetch} batches would fill the memory", "use 1000 or fewer")
        if not 0 < self.eval_fraction < 1:
            raise UserError("data.eval_fraction", f"{self.eval_fraction} is not between 0 and 1", "try 0.05")
        if self.mixture and self.source != DataConfig.source:
            raise UserError("data.source", f"data.mixture names other sources than {self.source!r}", "leave it out")
        if self.cache_bytes < 2**20:
            raise UserError("data.cache_bytes", f"{self.cache_bytes} holds no chunk of tokens", f"use {2**20} or more")
        one_of("data.corrupt", self.corrupt, ("fail", "skip_and_count"))
        one_of("data.packing", self.packing, ("concat", "best_fit", "bucket", "pairs", "answers"))
        if self.buckets != sorted({size for size in self.buckets if type(size) is int and 0 < size <= self.seq_len}):
            raise UserError("data.buckets",
                            f"{self.buckets} are not ascending lengths up to data.seq_len={self.seq_len}",
                            "give whole numbers, the shortest first")
        if self.packing == "bucket" and (self.mixture or self.stages):
            raise UserError("data.packing", "bucket has rows of several lengths already", "use concat or best_fit with "
                            "data.mixture and data.stages")
        if self.buckets and self.packing != "bucket":
            raise UserError("data.buckets", f"data.packing={self.packing} has none", "set data.packing=bucket")
        one_of("data.tokenizer", self.tokenizer, ("bytes",))
        for kind in self.augment:
            one_of("data.augment", kind, ("flip", "crop", "colour"))


# What models that are not decoders of text have in a row: data.packing, and in words.
ROWS = {"sequences": ("bucket", "one sequence of a prepared corpus"), "pictures": ("best_fit", "whole pictures")}
# The moments' keys that each optimizer reads.
READ_BY = {"adamw": "b1 b2 eps", "adafactor": "", "lion": "b1 b2", "sgd": "b1", "muon": "b1 b2 eps momentum"}


@dataclass(frozen=True)
class OptimizerConfig:
    """The optax optimizer, its schedule, and how its state is sharded over the data axis."""

    name: str = "adamw"  # made of optax's parts
    learning_rate: float = 1e-3  # the peak
    schedule: str = "cosine"  # how the learning rate decays
    warmup_steps: int = 0  # in which the learning rate rises linearly; or a fraction of train.steps
    decay_fraction: float = 0.2  # the last part of a "wsd" schedule
    final_fraction: float = 0.1  # fraction of learning_rate at the end of the decay
    weight_decay: float = 0.1  # weight decay of matrices, times the learning rate
    clip_norm: float = 1.0  # 0: no clipping
    b1: float = 0.9  # decay of the first moment; of adamw, lion, sgd (its momentum) and muon
    b2: float = 0.95  # decay of the second moment; of adamw, lion and muon
    momentum: float = 0.95  # momentum of the matrices that muon updates; AdamW updates the rest with b1 and b2
    eps: float = 1e-8  # added to the root of the second moment, of adamw and muon
    moment_dtype: str = "float32"  # dtype of matrices' moments between steps; int8: with a scale for each 128 elements
    zero_stage: int = 0  # over mesh.data, shard the optimizer's state (1), also gradients (2), also parameters (3)
    offload: bool = False  # keep the optimizer's state in host memory between steps: slower, but saves device memory

    def __post_init__(self):
        one_of("optimizer.name", self.name, tuple(READ_BY))
        for name in {"b1", "b2", "momentum", "eps"}.difference(READ_BY[self.name].split()):
            if getattr(self, name) != (default := getattr(OptimizerConfig, name)):
                raise UserError(f"optimizer.{name}", f"{self.name} does not read it", f"leave it out, or at {default}")
        one_of("optimizer.moment_dtype", self.moment_dtype, ("float32", "bfloat16", "int8"))
        if self.name == "adafactor" and self.moment_dtype != "float32":
            raise UserError("optimizer.moment_dtype", "adafactor keeps means of rows and columns, not moments",
                            "leave it out, or use adamw")
        one_of("optimizer.schedule", self.schedule, ("cosine", "linear", "wsd", "constant"))
        positive(self, "optimizer", "learning_rate eps")
        not_negative(self, "optimizer", "warmup_steps weight_decay clip_norm final_fraction")
        for name in ("b1", "b2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optimizer.{name}", f"{getattr(self, name)} is not in [0, 1)", "try 0.9")
        if not 0 < self.decay_fraction <= 1:
            raise UserError("optimizer.decay_fraction", f"{self.decay_fraction} is not in (0, 1]", "try 0.2")
        one_of("optimizer.zero_stage", self.zero_stage, (0, 1, 2, 3))


@dataclass(frozen=True)
class TrainConfig:
    """The loop and the compiled step."""

    steps: int = 100  # the length of the run in optimizer steps
    seed: int = 0  # seed of the initial parameters
    init_from: str = ""  # a folder in Hugging Face's format, or WORKDIR[@STEP], to begin with its parameters
    # initial encoder of vision_language: a published SigLIP or CLIP, or a run with an encoder
    init_encoder_from: str = ""
    accumulation: int = 1  # micro-batches per step
    precision: str = "auto"  # auto: bfloat16 on accelerators, float32 on CPU; fp8: bfloat16, layers' products in 8 bits
    attention: str = "auto"  # the kernel: auto chooses by device, dtype and shapes; docs/training.md
    check_memory: bool = True  # stop before compiling if the planner says that the run cannot fit in memory
    expert_exchange: str = "auto"  # how tokens reach their experts: "gather" all, or "ragged" all-to-all
    # size of experts' buffers relative to an even load; more tokens take more passes; 0: no limit
    expert_buffer: float = 2.0
    grouped_matmul: str = "auto"  # the kernel of experts: auto chooses by device, dtype and shapes
    # kept of a layer: "none": all; "full": its input; "dots": also matmuls; "attention": also its output
    remat: str = "none"
    unroll: int = -1  # layers per scan iteration; 0: all of them; -1: all on GPUs where that is faster, else 1
    loss_chunks: int = 0  # chunks in which the loss of a micro-batch is computed; 0: chosen by size
    z_loss: float = 0.0  # coefficient of the squared log-partition of the logits
    ema_decay: float = 0.0  # decay of the weights' moving average (EMA), which is evaluated and saved; 0: none
    log_every: int = 1  # steps between lines of metrics.jsonl
    eval_every: int = 0  # steps between evaluations, or a fraction of train.steps; 0: at the end only
    eval_batches: int = 8  # batches of each evaluation
    sample_tokens: int = 0  # length of the text sampled at the end
    progress: bool = True  # show a progress line
    # parameters that are not trained, by paths with wildcards or logical axes
    freeze: list[str] = field(default_factory=list, hash=False)
    # the only parameters that are trained, named in the same way
    trainable: list[str] = field(default_factory=list, hash=False)
    frozen_dtype: str = ""  # dtype of frozen parameters; "": as the others
    deterministic: bool = False  # make steps bit-for-bit reproducible on GPUs too; resilience.replay_every needs it
    # XLA options in addition to the preset; "": leave an option to XLA
    compiler_options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self):
        for key in ("freeze", "trainable"):
            if wrong := [pattern for pattern in getattr(self, key) if not isinstance(pattern, str)]:
                raise UserError(f"train.{key}", f"{wrong[0]!r} is not text", "give paths or logical axis names")
        one_of("train.frozen_dtype", self.frozen_dtype, ("", "float32", "bfloat16", "float16"))
        positive(self, "train", "accumulation log_every eval_batches")
        not_negative(self, "train", "steps expert_buffer loss_chunks z_loss eval_every sample_tokens")
        if not 0 <= self.ema_decay < 1:
            raise UserError("train.ema_decay", f"{self.ema_decay} is not in [0, 1)", "try 0.999, or 0 for none")
        if self.unroll < -1:
            raise UserError("train.unroll", f"{self.unroll} is below -1", "give a number of layers, 0 for all of them, "
                            "or -1, which chooses")
        for name in ("steps", "seed"):
            if not -(2**31) <= getattr(self, name) < 2**31:
                raise UserError(f"train.{name}", f"{getattr(self, name)} is more than 32 bits hold",
                                "use less than 2^31")
        one_of("train.precision", self.precision, ("auto", *PRECISIONS))
        one_of("train.attention", self.attention, ("auto", "xla", "cudnn", "mosaic", "splash"))
        one_of("train.expert_exchange", self.expert_exchange, ("auto", "gather", "ragged"))
        one_of("train.grouped_matmul", self.grouped_matmul, ("auto", "xla", "mosaic"))
        for part in self.remat.split(","):
            remat_policies.policy(part.partition(":")[0])


@dataclass(frozen=True)
class CheckpointConfig:
    """The section `checkpoint`: when to save and how many to keep; the last step is always saved."""

    every: int = 500  # steps between saves, or a fraction of train.steps; 0: at the end only. Runs suggest a value
    keep: int = 2  # how many of the newest good checkpoints stay; nothing newer than them is ever deleted
    keep_every: int = 0  # checkpoints at multiples of this step are kept forever; 0: none
    best: str = ""  # keep the checkpoint with the lowest METRIC, such as eval_loss, or highest:METRIC; "": none
    verify: str = "full"  # check before loading: "full" reads and hashes every file, "sizes" compares only sizes
    mtbf_hours: float = 0.0  # expected hours between failures, for advice about `every`; 0: 3,692 / processes
    mirror: str = ""  # a path or URL (s3://bucket/run) where verified checkpoints are mirrored; "": none
    # A second, faster tier: every so many steps each process keeps its part in this machine's memory, and a peer's.
    # 0: off, since it takes up to three times the state of host memory, and as much for the peer.
    local_checkpoint_every: int = 0
    # folder for these snapshots; "": /dev/shm or the folder for temporary files; may name variables
    local_dir: str = ""

    def __post_init__(self):
        not_negative(self, "checkpoint", "every mtbf_hours keep_every local_checkpoint_every")
        positive(self, "checkpoint", "keep")
        one_of("checkpoint.verify", self.verify, ("full", "sizes"))


@dataclass(frozen=True)
class ResilienceConfig:
    """The section `resilience`: what is watched for, and what is done about failures, hangs and anomalies."""

    elastic: bool = False  # use another mesh if the configured one does not fit the devices; set by the supervisor
    # meshes to use then, best first, such as "data=2,tensor=2"; none: derived
    meshes: list[str] = field(default_factory=list, hash=False)
    hang_factor: float = 20.0  # a step that takes this many times the median step time counts as hung; 0: never
    hang_floor: float = 120.0  # minimum time in seconds before a step counts as hung
    start_limit: float = 3600.0  # limit in seconds for everything else: start, compilation, evaluation, saving
    spikes: str = "record"  # on spikes of loss or gradient norm: "record" them, "skip" the update, or "rollback"
    spike_z: float = 20.0  # robust standard deviations above the median of the last 128 steps that make a spike
    max_skips: int = 10  # consecutive skipped updates before the run stops (with "rollback": rolls back)
    skip_batches: int = 16  # batches that a rollback skips: the batch of the spike and those before it
    max_rollbacks: int = 10  # rollbacks of the whole run before it stops
    check_every: int = 200  # steps between comparisons of replicas, which must be equal; before saves too; 0: never
    replay_every: int = 0  # steps between steps that are run twice and must give the same bits; 0: never
    probe_every: float = 60.0  # seconds between comparisons of how fast processes and devices are; 0: never
    straggler_factor: float = 1.25  # a process that is this many times slower than its peers is reported

    def __post_init__(self):
        not_negative(self, "resilience", "check_every replay_every probe_every")
        if self.straggler_factor <= 1:
            raise UserError("resilience.straggler_factor", f"{self.straggler_factor} would name processes that are not "
                            "slow", "give more than 1, such as 1.25")
        one_of("resilience.spikes", self.spikes, ("record", "skip", "rollback"))
        positive(self, "resilience", "spike_z max_skips skip_batches")
        not_negative(self, "resilience", "max_rollbacks")
        not_negative(self, "resilience", "hang_factor")
        positive(self, "resilience", "hang_floor start_limit")
        for text in self.meshes:
            parts = [part.strip().partition("=") for part in text.split(",")] if isinstance(text, str) else []
            if not parts or any(axis not in AXES or not (size == "-1" or (size.isdecimal() and int(size)))
                                for axis, _, size in parts):
                raise UserError("resilience.meshes", f"{text!r} is not a mesh", "write them as 'data=4,tensor=2'")


@dataclass(frozen=True)
class Config:
    """A whole run. What is not written in a config file has the default written here."""

    model: ModelConfig = field(default_factory=Gpt2Config)  # model.name picks the class: jaxtrain/config/families.py
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    reinforce: ReinforceConfig = field(default_factory=ReinforceConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    islands: IslandsConfig = field(default_factory=IslandsConfig)

    def __post_init__(self):
        if self.data.seq_len > (longest := self.model.longest_row):
            key = "max_seq_len" if longest == self.model.max_seq_len else "audio_positions"
            raise UserError("data.seq_len", f"{self.data.seq_len} exceeds model.{key}={getattr(self.model, key)}",
                            f"lower it or raise model.{key}")
        remat_policies.policies(self.train.remat, self.model.stacked_layers)
        if self.data.global_batch_size % self.train.accumulation:
            raise UserError("data.global_batch_size", f"{self.data.global_batch_size} does not divide into "
                            f"train.accumulation={self.train.accumulation} micro-batches",
                            f"try {_round_up(self.data.global_batch_size, self.train.accumulation)}")
        if self.optimizer.warmup_steps > self.train.steps:
            raise UserError("optimizer.warmup_steps", f"{self.optimizer.warmup_steps} exceeds "
                            f"train.steps={self.train.steps}", "warm up for fewer steps")
        self._check_kind()
        for section in (tuning_keys, compression_keys, sparsity_keys, island_keys):
            section.check(self)

    def _check_kind(self):
        """Refuse keys of text for models that are not decoders of it, and the other way round."""
        pictures = self.model.rows_of == "pictures"
        if self.data.augment and not pictures:
            raise UserError("data.augment", f"{self.model.name} reads no pictures", "leave it out")
        if self.data.crop and (self.model.text or pictures):
            raise UserError("data.crop", f"{self.model.name} has rows that hold all of a "
                            f"{'picture' if pictures else 'text'}", "leave it out")
        if self.model.text:
            return
        packing, rows = ROWS[self.model.rows_of]
        if self.data.packing != packing:
            raise UserError("data.packing", f"{self.model.name} has {rows} in a row", f"set data.packing={packing}")
        of_text = ("train.sample_tokens lora.rank preference.loss reinforce.prompts islands.count data.mixture "
                   "data.stages data.cross_document_attention evaluation.tasks")
        for key in (*of_text.split(), *["data.corrupt"] * (self.data.corrupt != "fail")):
            if attrgetter(key)(self):
                raise UserError(key, f"it is for decoders of text, and {self.model.name} is not one", "leave it out")

    @property
    def scalar_head(self) -> str:
        """The name of the head that the model has for rewards or values; "" without one."""
        return "reward_head" if self.preference.reward_head else "value_head" if self.reinforce.value_head else ""

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain nested dicts, as written to `config.json`: without the credentials in URLs."""
        return redacted(dataclasses.asdict(self))

    def hash(self) -> str:
        """Identifies the resolved config."""
        return hash_of(self.to_dict())


def hash_of(sections: dict[str, Any]) -> str:
    """Return the hash that identifies a resolved config, or the part of one that counts for a run."""
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()[:16]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

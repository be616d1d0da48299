"""The schema: one frozen dataclass per section. A config file only fills it; the user's override always wins."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from jaxtrain.base.annotations import JsonObject
from jaxtrain.config import part_tables, remat_policies
from jaxtrain.config.family import config_class
from jaxtrain.config.field_checks import at_most, bounded, choice, derive, each_of, number
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.sections import compression_keys, diloco_keys, precision_keys, sparsity_keys, tuning_keys
from jaxtrain.config.sections.compression_keys import CompressionConfig
from jaxtrain.config.sections.diloco_keys import DilocoConfig
from jaxtrain.config.sections.observe_keys import ObserveConfig
from jaxtrain.config.sections.sparsity_keys import SparsityConfig
from jaxtrain.config.sections.tuning_keys import EvaluationConfig, LoraConfig, PreferenceConfig, RLConfig
from jaxtrain.errors import UserError
from jaxtrain.redaction import redacted

PRECISIONS = ("float32", "bfloat16", "float16", *precision_keys.NARROW)
MOST_PARAMETERS = 10**14  # a hundred times the largest published models
AXES = ("data", "fsdp", "stage", "context", "expert", "tensor")  # as in mesh.py, which imports JAX


@dataclass(frozen=True)
class MeshConfig:
    """The device mesh: the size of each axis (one may be -1: all remaining devices), and the sharding rules."""

    auto: bool = False  # the planner chooses the sizes of all axes; usually written as mesh=auto
    hsdp: bool = False  # hybrid sharding: fsdp within each node, data across nodes; usually written as mesh=hsdp
    # size of data parallelism: each replica holds all parameters, unless optimizer.zero_stage shards them
    data: int = at_most(-1, 2**20)
    # size of fully sharded data parallelism: parameters are sharded, and gathered layer by layer
    fsdp: int = at_most(1, 2**20)
    stage: int = at_most(1, 2**20)  # size of pipeline parallelism: each stage holds some of the layers
    context: int = at_most(1, 2**20)  # size of context parallelism: each device holds a part of every sequence
    expert: int = at_most(1, 2**20)  # size of expert parallelism: each device holds some of the experts
    # size of tensor parallelism: attention heads, MLPs and the vocabulary are sharded, and the sequence between them
    tensor: int = at_most(1, 2**20)
    # communication of attention when mesh.context splits sequences: docs/parallelism.md
    context_strategy: str = choice("auto", "auto", "ring", "gather", "ulysses")
    rules: str = "fsdp_tp"  # how logical axis names map to mesh axes: data, fsdp or fsdp_tp
    # changes to these rules: logical axis name -> "axis", "a+b" (both axes) or "none"
    overrides: dict[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self):
        bounded(self, "mesh")
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
        for name, axes in self.overrides.items():
            if not isinstance(axes, str):
                raise UserError(f"mesh.overrides.{name}", f"{axes!r} is not text", "give 'axis', 'a+b' or 'none'")


@dataclass(frozen=True)
class PipelineConfig:
    """The pipeline schedule, which is used if mesh.stage is more than 1."""

    # the schedule of forward and backward passes of micro-batches
    schedule: str = choice("1f1b", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")
    # pipeline micro-batches per batch, or per train.accumulation part; 0: chosen automatically, or as in pipeline.table
    microbatches: int = at_most(0, 2**16, least=0)
    # chunks of layers (virtual stages) on each stage; 0: 2 for interleaved and zb_v, else 1, or as in pipeline.table
    chunks: int = at_most(0, 10_000, least=0)
    # overlap transfers between stages with computation, by one tick more for each transfer: this makes the bubble
    # longer
    overlap: bool = False
    # compute the forward pass of a stage again in its backward pass; false: keep what train.remat keeps, of each
    # micro-batch between its forward and its backward pass, which takes more memory and a quarter less computation
    recompute: bool = True
    table: str = ""  # a CSV or JSON file with a schedule of your own

    def __post_init__(self):
        bounded(self, "pipeline")
        if not self.table:
            derive(self, "chunks", 2 if self.schedule in ("interleaved", "zb_v") else 1)


@dataclass(frozen=True)
class DataConfig:
    """The training data: sources, tokenizer, packing, and the size and order of batches."""

    # a prepared corpus, or a file or folder of text; "stdlib": the source code of Python's standard library
    source: str = "stdlib"
    tokenizer: str = "bytes"  # tokenizer of a source that is text; a prepared corpus has its own
    # several sources to mix, instead of data.source: name -> {source, weight, epochs}
    mixture: dict[str, Any] = field(default_factory=dict, hash=False)
    # changes of sources' weights, sequence length or batch size during the run: docs/data-mixtures.md
    stages: list[Any] = field(default_factory=list, hash=False)
    # how documents become sequences of seq_len tokens. concat: joined end to end and cut at seq_len. best_fit: packed
    # so that few are cut. bucket: one document per sequence, batched by length (prepared sequences need it). pairs,
    # answers: preference pairs or labelled answers, one per row, never cut
    packing: str = choice("concat", "concat", "best_fit", "bucket", "pairs", "answers")
    # with packing=bucket, the sequence lengths of the buckets, ascending; []: chosen automatically
    buckets: list[int] = field(default_factory=list, hash=False)
    crop: bool = False  # truncate prepared sequences of more than seq_len steps; false: refuse them
    # let tokens attend to earlier documents in the same sequence, as many published recipes do
    cross_document_attention: bool = False
    seq_len: int = at_most(256, 2**28, above=0)  # sequence length in tokens
    global_batch_size: int = at_most(16, 2**24, above=0)  # sequences per step (batch size), over all devices
    seed: int = at_most(0, 2**63 - 1)  # seed of the shuffling of the data
    # share of the files that is held out for evaluation; a single file is split by position
    eval_fraction: float = number(0.05, above=0, below=1, fix="try 0.05")
    cache_dir: str = ""  # folder for tokenized and downloaded data; "": $JAXTRAIN_CACHE or ~/.cache/jaxtrain
    # most bytes of the local disk cache of a corpus in object storage
    cache_bytes: int = at_most(2**36, 2**60, least=2**20)
    # what to do about corrupt data: "fail", or "skip_and_count": sequences with corrupt data carry no loss
    corrupt: str = choice("fail", "fail", "skip_and_count")
    prefetch: int = at_most(2, 1000, above=0)  # number of batches prepared ahead in a background thread
    # worker processes of Grain that read training batches, for data that one thread cannot read fast enough, such as
    # augmented images or audio; each holds two or three batches. 0: none
    workers: int = at_most(0, 256, least=0)
    # random augmentations of training images: "flip", "crop", "colour"
    augment: list[str] = field(default_factory=list, hash=False, metadata=each_of("flip", "crop", "colour"))

    def __post_init__(self):
        bounded(self, "data")
        if not self.source:
            raise UserError("data.source", "it is empty", "name a folder or file of text, or a prepared corpus")
        if self.mixture and self.source != DataConfig.source:
            raise UserError("data.source", f"data.mixture names other sources than {self.source!r}", "leave it out")
        if self.buckets != sorted({size for size in self.buckets if type(size) is int and 0 < size <= self.seq_len}):
            raise UserError("data.buckets",
                            f"{self.buckets} are not ascending lengths up to data.seq_len={self.seq_len}",
                            "give whole numbers, the shortest first")
        if self.packing == "bucket" and (self.mixture or self.stages):
            raise UserError("data.packing", "bucket has sequences of several lengths already",
                            "use concat or best_fit with "
                            "data.mixture and data.stages")
        if self.buckets and self.packing != "bucket":
            raise UserError("data.buckets", f"data.packing={self.packing} has none", "set data.packing=bucket")
        if self.tokenizer != "bytes":
            raise UserError("data.tokenizer", f"text that is not prepared is read as bytes, not with {self.tokenizer}",
                            f"run jaxtrain prepare --input=TEXT --output=CORPUS --tokenizer={self.tokenizer}, and set "
                            "data.source=CORPUS")


# What models that are not decoders of text have in a row: data.packing, and in words.
ROWS = {"sequences": ("bucket", "one sequence of a prepared corpus"), "images": ("best_fit", "whole images")}


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer (built with optax), its learning rate schedule, and the sharding of its state."""

    name: str = "adamw"  # the optimizer
    learning_rate: float = number(1e-3, above=0)  # the peak learning rate
    schedule: str = "cosine"  # how the learning rate decays after warmup
    warmup_steps: int = number(0, least=0, of_steps=True)  # steps of linear warmup; or a fraction of train.steps
    # with schedule=wsd, the share of the run in which the learning rate decays
    decay_fraction: float = number(0.2, above=0, most=1.0, fix="try 0.2")
    # learning rate at the end of the decay, as a fraction of learning_rate
    final_fraction: float = number(0.1, least=0)
    # weight decay, applied to matrices only and multiplied by the learning rate
    weight_decay: float = number(0.1, least=0)
    clip_norm: float = number(1.0, least=0)  # gradients are clipped to this global norm; 0: no clipping
    # decay rate of the first moment in adamw, lion and muon; the momentum of sgd
    b1: float = number(0.9, least=0, below=1, fix="try 0.9")
    # decay rate of the second moment in adamw, lion and muon
    b2: float = number(0.95, least=0, below=1, fix="try 0.95")
    # momentum of the matrices that muon updates; it updates all other parameters as AdamW, with b1 and b2
    momentum: float = number(0.95, least=0, below=1, fix="try 0.95")
    eps: float = number(1e-8, above=0)  # epsilon of adamw and muon, added to the square root of the second moment
    # with muon: dtype of the products that make matrices orthogonal; auto: bfloat16 on accelerators, float32 on CPU
    orthogonal_dtype: str = choice("auto", "auto", "bfloat16", "float32")
    split_heads: bool = False  # with muon: make each attention head's matrix orthogonal by itself
    normalize_neurons: bool = False  # with muon: divide the update of each neuron by its root mean square (NorMuon)
    # largest attention logit that a head may have: after a step that had a larger one, the head's query and key weights
    # are scaled down to it (QK-clip); 100 in Kimi K2; 0: off
    qk_clip: float = number(0.0, least=0)
    # dtype in which moments of matrices are stored; int8: with one scale per 128 elements
    moment_dtype: str = choice("float32", "float32", "bfloat16", "int8")
    # ZeRO stage over mesh.data: shard the optimizer state (1), also gradients (2), also parameters (3)
    zero_stage: int = choice(0, 0, 1, 2, 3)
    offload: bool = False  # keep the optimizer state in host memory between steps: slower, but saves device memory

    def __post_init__(self):
        bounded(self, "optimizer")
        part_tables.OPTIMIZERS.check(self.name)
        for name in part_tables.OPTIMIZER_KEYS.difference(part_tables.moments_of(self.name)):
            if getattr(self, name) != (default := getattr(OptimizerConfig, name)):
                raise UserError(f"optimizer.{name}", f"{self.name} does not read it", f"leave it out, or at {default}")
        if not part_tables.moments_of(self.name) and self.moment_dtype != "float32":
            raise UserError("optimizer.moment_dtype", f"{self.name} keeps no moments that this would round",
                            "leave it out, or use adamw")
        part_tables.SCHEDULES.check(self.schedule)


@dataclass(frozen=True)
class TrainConfig:
    """The training loop and the compiled step."""

    steps: int = number(100, least=0)  # number of optimizer steps in the run
    # length of the run in passes over the training data, instead of train.steps; 0: not used
    epochs: float = number(0.0, least=0)
    seed: int = 0  # seed of the random initial parameters
    # initial parameters: a folder in Hugging Face's format, or the WORKDIR[@STEP] of a run; "": random
    init_from: str = ""
    # initial image encoder of vision_language: a published SigLIP or CLIP, or a run with an encoder
    init_encoder_from: str = ""
    accumulation: int = at_most(1, 2**16, above=0)  # gradient accumulation: number of micro-batches per step
    # dtype of computation. auto: bfloat16 on accelerators, float32 on CPU; fp8, mxfp8: bfloat16, with the matmuls of
    # layers in 8 bits; nvfp4: in 4 bits
    precision: str = choice("auto", "auto", *PRECISIONS)
    # layers at the start of each stack whose matmuls stay in bfloat16 with fp8, mxfp8 and nvfp4
    layers_at_start_in_bf16: int = at_most(0, 10_000, least=0)
    layers_at_end_in_bf16: int = at_most(0, 10_000, least=0)  # likewise at the end
    experts_in_bf16: bool = False  # whether the matmuls of routed experts stay in bfloat16 with fp8, mxfp8 and nvfp4
    objective: str = ""  # the objective; "": that of the family, of preference.loss or of rl.prompts
    # attention kernel; auto: chosen by device, dtype and shapes (docs/training.md)
    attention: str = choice("auto", "auto", "xla", "cudnn", "mosaic", "triton", "splash")
    # before compiling, refuse a run that will not fit in device memory according to the planner
    check_memory: bool = True
    # how tokens reach their experts with expert parallelism: "gather" (all-gather) or "ragged" (all-to-all)
    expert_exchange: str = choice("auto", "auto", "gather", "ragged")
    # size of the experts' buffers relative to a balanced load; tokens that do not fit take additional passes; 0: no
    # limit
    expert_buffer: float = number(1.25, least=0)
    # kernel of the experts' matrix products; auto: chosen by device, dtype and shapes
    grouped_matmul: str = choice("auto", "auto", "xla", "mosaic", "triton")
    # kernels for chunks in recurrent layers; pallas: for TPUs and NVIDIA GPUs; auto: xla, since no device ran them yet
    recurrent_kernel: str = choice("auto", "auto", "xla", "pallas")
    # activations of a layer that are kept for the backward pass; the others are recomputed. "none": keep all; "full":
    # only the layer's input; "dots": also the results of matmuls; "attention": also the output of attention;
    # "attention_and_dots"; "auto": chosen by the planner; more in docs/training.md
    remat: str = "none"
    # layers per iteration of the scan over layers; 0: all of them; -1: all on GPUs where that is faster, else 1
    unroll: int = at_most(-1, 10_000, least=-1, fix="give a number of layers, 0 for all of them, or -1, which chooses")
    # number of chunks in which logits and loss of a micro-batch are computed, to save memory; 0: chosen by size
    loss_chunks: int = at_most(0, 2**20, least=0)
    # what computes the loss and its gradient from the logits; triton: one kernel, for NVIDIA GPUs in 16 bits, where the
    # vocabulary is not split over devices; auto: xla, because no device has run the kernel yet
    loss_kernel: str = choice("auto", "auto", "xla", "triton")
    z_loss: float = number(0.0, least=0)  # coefficient of the z-loss, the squared log-partition of the logits; 0: none
    # NEFTune: scale of the noise added to embeddings in training, such as 5; 0: none
    neftune_noise_alpha: float = number(0.0, least=0)
    # decay of an exponential moving average of the weights, which is then evaluated and saved; 0: none
    ema_decay: float = number(0.0, least=0, below=1, fix="try 0.999, or 0 for none")
    log_every: int = number(1, above=0)  # steps between lines of metrics.jsonl
    # steps between evaluations, or a fraction of train.steps; 0: only at the end
    eval_every: int = number(0, least=0, of_steps=True)
    eval_batches: int = number(8, above=0)  # number of batches in each evaluation
    # early stopping: number of consecutive evaluations without a new lowest eval_loss after which the run ends; 0: off
    patience: int = number(0, least=0)
    # number of tokens to generate as a sample at the end of the run; 0: no sample
    sample_tokens: int = at_most(0, 2**24, least=0)
    progress: bool = True  # show a progress line in the terminal
    # parameters that are not trained: paths with wildcards, or logical axes
    freeze: list[str] = field(default_factory=list, hash=False)
    # the only parameters that are trained: paths with wildcards, or logical axes
    trainable: list[str] = field(default_factory=list, hash=False)
    # dtype of frozen parameters; "": the same as that of the trained ones
    frozen_dtype: str = choice("", "", "float32", "bfloat16", "float16")
    deterministic: bool = False  # make steps bitwise reproducible on GPUs too; resilience.replay_every needs it
    # XLA compiler options, added to the preset; the value "" leaves an option at XLA's default
    compiler_options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self):
        bounded(self, "train")
        for key in ("freeze", "trainable"):
            if wrong := [pattern for pattern in getattr(self, key) if not isinstance(pattern, str)]:
                raise UserError(f"train.{key}", f"{wrong[0]!r} is not text", "give paths or logical axis names")
        if self.epochs:
            if self.steps not in (0, TrainConfig.steps):
                raise length_given_twice(self.steps, self.epochs)
            object.__setattr__(self, "steps", 0)  # not known until the data are read
        if self.patience and not self.eval_every:
            raise UserError("train.patience", "it counts evaluations, and train.eval_every=0 leaves only the one "
                            "after the last step", "set train.eval_every, such as 0.05")
        if self.objective:
            part_tables.OBJECTIVES.check(self.objective)
        for part in self.remat.split(","):
            remat_policies.policy(part.partition(":")[0])


@dataclass(frozen=True)
class CheckpointConfig:
    """The checkpoints: when they are saved and how many are kept; the last step is always saved."""

    # steps between checkpoints, or a fraction of train.steps; 0: only at the end
    every: int = number(500, least=0, of_steps=True)
    # number of newest valid checkpoints to keep; nothing newer than these is ever deleted
    keep: int = number(2, above=0)
    keep_every: int = number(0, least=0)  # keep checkpoints at multiples of this step forever; 0: none
    # also keep the checkpoint with the lowest value of a metric, such as eval_loss, or the highest, as highest:METRIC
    best: str = ""
    # verification before loading: "full" reads and hashes every file, "sizes" compares sizes only
    verify: str = choice("full", "full", "sizes")
    # mean time between failures in hours, for the hint about checkpoint.every; 0: 3,692 / number of processes
    mtbf_hours: float = number(0.0, least=0)
    # path or URL (s3://bucket/run) to which valid checkpoints are also copied, and from which they are restored; "":
    # none
    mirror: str = ""
    # steps between in-memory checkpoints: each process keeps its shards in its own machine's memory and in a peer's. 0:
    # off, since it takes up to three times the state of host memory, and as much for the peer.
    local_checkpoint_every: int = number(0, least=0)
    # folder for in-memory checkpoints; "": /dev/shm or the folder for temporary files; may contain environment
    # variables
    local_dir: str = ""

    def __post_init__(self):
        bounded(self, "checkpoint")


@dataclass(frozen=True)
class ResilienceConfig:
    """Detection of failures, hangs and anomalies, and the reactions to them."""

    elastic: bool = False  # use another mesh if the configured one does not fit the devices; set by the supervisor
    # with elastic, the meshes to use, best first, such as "data=2,tensor=2"; []: derived from the configured one
    meshes: list[str] = field(default_factory=list, hash=False)
    # a step counts as hung after this many times the median step time; 0: never
    hang_factor: float = number(20.0, least=0)
    hang_floor: float = number(120.0, above=0)  # seconds before which no step counts as hung
    # timeout in seconds of everything but steps: start, compilation, evaluation, saving
    start_limit: float = number(3600.0, above=0)
    # what to do on a spike of loss or gradient norm: "record" it, "skip" the update, or "rollback"
    spikes: str = choice("record", "record", "skip", "rollback")
    # threshold of a spike, in robust standard deviations above the median of the last 128 steps
    spike_z: float = number(20.0, above=0)
    # consecutive skipped updates after which the run stops (or, with "rollback", rolls back)
    max_skips: int = number(10, above=0)
    # number of batches that a rollback skips: the one with the spike and those before it
    skip_batches: int = number(16, above=0)
    max_rollbacks: int = number(10, least=0)  # number of rollbacks in the whole run after which it stops
    # steps between checks that replicas hold the same bits (silent data corruption); also before each save; 0: never
    check_every: int = number(200, least=0)
    # steps between steps that are computed twice and must give the same bits; 0: never
    replay_every: int = number(0, least=0)
    probe_every: float = number(60.0, least=0)  # seconds between speed comparisons of processes and devices; 0: never

    def __post_init__(self):
        bounded(self, "resilience")
        for text in self.meshes:
            parts = [part.strip().partition("=") for part in text.split(",")] if isinstance(text, str) else []
            if not parts or any(axis not in AXES or not (size == "-1" or (size.isdecimal() and int(size)))
                                for axis, _, size in parts):
                raise UserError("resilience.meshes", f"{text!r} is not a mesh", "write them as 'data=4,tensor=2'")

    @property
    def longest_hang(self) -> float:
        """The seconds after which the watchdog has surely ended a process that hangs; 0: it ends none."""
        return max(self.start_limit, self.hang_floor) + 60 if self.hang_factor else 0.0


@dataclass(frozen=True)
class Config:
    """A whole run. What is not written in a config file has the default written here."""

    # model.name picks the class: jaxtrain/config/family.py
    model: ModelConfig = field(default_factory=lambda: config_class("gpt2")())
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    diloco: DilocoConfig = field(default_factory=DilocoConfig)
    plug_ins: dict[str, Any] = field(default_factory=dict, hash=False)  # options of other packages' parts, by name

    def __post_init__(self):
        if self.model.rough_size > MOST_PARAMETERS:
            raise UserError("model", f"its sizes make {self.model.rough_size:.1e} parameters, and the limit is "
                            f"{MOST_PARAMETERS:.0e}", "lower num_layers, embed_dim, mlp_dim or what else is large")
        if self.data.seq_len > (longest := self.model.longest_row):
            key = "max_seq_len" if longest == self.model.max_seq_len else "audio_positions"
            raise UserError("data.seq_len", f"{self.data.seq_len} exceeds model.{key}={getattr(self.model, key)}",
                            f"lower it or raise model.{key}")
        remat_policies.policies(self.train.remat, self.model.stacked_layers)
        if self.data.global_batch_size % self.train.accumulation:
            raise UserError("data.global_batch_size", f"{self.data.global_batch_size} does not divide into "
                            f"train.accumulation={self.train.accumulation} micro-batches",
                            f"try {_round_up(self.data.global_batch_size, self.train.accumulation)}")
        if self.optimizer.warmup_steps > self.train.steps and not self.train.epochs:
            raise UserError("optimizer.warmup_steps", f"{self.optimizer.warmup_steps} exceeds "
                            f"train.steps={self.train.steps}", "warm up for fewer steps")
        self._check_kind()
        for key in ("preference.loss", "rl.prompts"):
            if self.train.objective and attrgetter(key)(self):
                raise UserError("train.objective", f"{key} asks for another objective", "leave out one of them")
        if self.data.workers and (self.rl.prompts or self.preference.reference == "precomputed"):
            raise UserError("data.workers", "batches hold what the model says of them, in the process that trains it",
                            "leave it out")
        for section in (tuning_keys, precision_keys, compression_keys, sparsity_keys, diloco_keys):
            section.check(self)
        if self.rl.prompts:
            from jaxtrain.config.sections import rl_checks  # which other runs need not read

            rl_checks.check(self)

    def _check_kind(self):
        """Refuse keys of text for models that are not decoders of it, and the other way round."""
        images = self.model.rows_of == "images"
        if self.data.augment and not images:
            raise UserError("data.augment", f"{self.model.name} is not a model of images", "leave it out")
        if self.data.crop and (self.model.text or images):
            raise UserError("data.crop", f"{self.model.name} has rows that hold all of a "
                            f"{'image' if images else 'text'}", "leave it out")
        if self.model.text:
            return
        packing, rows = ROWS[self.model.rows_of]
        if self.data.packing != packing:
            raise UserError("data.packing", f"{self.model.name} has {rows} in a row", f"set data.packing={packing}")
        of_text = ("train.sample_tokens lora.rank preference.loss rl.prompts diloco.count data.mixture "
                   "data.stages data.cross_document_attention evaluation.tasks")
        for key in (*of_text.split(), *["data.corrupt"] * (self.data.corrupt != "fail")):
            if attrgetter(key)(self):
                raise UserError(key, f"it is for decoders of text, and {self.model.name} is not one", "leave it out")

    @property
    def scalar_head(self) -> str:
        """The name of the head that the model has for rewards or values; "" without one."""
        return "reward_head" if self.preference.reward_head else "value_head" if self.rl.value_head else ""

    def to_dict(self) -> dict[str, JsonObject]:
        """Plain nested dicts, as written to `config.json`: without the credentials in URLs."""
        sections = dataclasses.asdict(self)
        return redacted(sections | sections.pop("plug_ins"))

    def hash(self) -> str:
        """Identifies the resolved config."""
        return hash_of(self.to_dict())


def length_given_twice(steps: int, epochs: float) -> UserError:
    """Return the refusal of a config that gives the length of the run in steps and in epochs."""
    return UserError("train.epochs", f"{epochs:g} epochs and train.steps={steps} are two lengths of one run",
                     "leave one of them out")


def hash_of(sections: JsonObject) -> str:
    """Return the hash that identifies a resolved config, or the part of one that counts for a run."""
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()[:16]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

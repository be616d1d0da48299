"""Estimate the time of a step roughly and without a trace, only to exclude meshes that cannot be among the best."""

import dataclasses
import math
from dataclasses import dataclass

from jaxtrain.builder import build
from jaxtrain.config.schema import Config, MeshConfig, PipelineConfig
from jaxtrain.observe.flops import flops_per_token
from jaxtrain.parallel import experts
from jaxtrain.plan.cost import links
from jaxtrain.plan.estimate import divisors
from jaxtrain.plan.targets import Target
from jaxtrain.plan.trace.program import Collective
from jaxtrain.train_step.report import matmul_parameters, total

TWO_BYTES = 2  # bytes of a weight or an activation in a collective


def rows(config: Config, mesh: dict[str, int]) -> int:
    """Return the rows of the batch on one device; 0 if there are more devices than rows."""
    return config.data.global_batch_size // (mesh["mesh.data"] * mesh["mesh.fsdp"] * mesh["mesh.expert"])


@dataclass(frozen=True)
class Size:
    """The size of a model, independent of the mesh."""

    parameters: int  # bytes
    optimizer: int
    per_token: float  # FLOP, forward and backward

    @classmethod
    def of(cls, config: Config, platform: str) -> "Size":
        """Return the size of a config's model."""
        alone = dataclasses.replace(config, mesh=MeshConfig(data=1), pipeline=PipelineConfig(),
                                    train=dataclasses.replace(config.train, accumulation=1))
        run = build(alone, devices=1, platform=platform)
        active = matmul_parameters(run.abstract, run.layout, config.model)
        return cls(total(run.abstract.all_params), total(run.abstract.opt_state),
                   flops_per_token(config.model, active, config.data.seq_len, True))

    def state(self, mesh: dict[str, int], zero_stage: int, offload: bool) -> float:
        """Return the least bytes of state on a device: all axes except `data` split everything."""
        split = math.prod(mesh.values()) / mesh["mesh.data"]
        parameters = self.parameters / (mesh["mesh.data"] if zero_stage == 3 else 1)
        return parameters / split if offload else parameters / split + self.moments(mesh, zero_stage)

    def moments(self, mesh: dict[str, int], zero_stage: int) -> float:
        """Return the bytes of the optimizer's state on a device."""
        return self.optimizer / math.prod(mesh.values()) * (1 if zero_stage else mesh["mesh.data"])


def seconds(config: Config, target: Target, mesh: dict[str, int], size: Size, left: float) -> float:
    """Return the seconds of a step: computation at a usual rate, communication of weights and activations, the bubble.

    `left`: bytes of a device for activations. The batch is cut into as few parts as these allow, and weights are
    gathered for each part.
    """
    sizes, model = {key.removeprefix("mesh."): n for key, n in mesh.items()}, config.model
    computing = work(config, target, mesh, size) / (target.efficiency["matmul"] * target.peak["bfloat16"])

    def talk(kind: str, axes: tuple[str, ...], size: float) -> float:
        return links.seconds(Collective(kind, axes, int(size)), target, sizes)

    split = sizes["stage"] * sizes["tensor"] * sizes["expert"]
    here = size.parameters / 4 / split * TWO_BYTES  # of a device's layers, gathered
    tokens = config.data.global_batch_size * config.data.seq_len
    mine = tokens / (sizes["data"] * sizes["fsdp"] * sizes["expert"] * sizes["context"])
    layers = model.num_layers / sizes["stage"]
    wide = mine * model.embed_dim * TWO_BYTES
    kept = layers * wide + 2 * _masked(config, target, sizes) * mine * (
        model.embed_dim + model.experts.mlp_dim) * TWO_BYTES
    most = rows(config, mesh) if sizes["stage"] == 1 else 1
    parts = next((n for n in divisors(most) if kept <= n * left), most)
    weights = 2 * talk("all-gather", ("fsdp",), here) + talk("reduce-scatter", ("fsdp",), here / sizes["fsdp"])
    weights = parts * weights + talk("all-reduce", ("data",), here / sizes["fsdp"])
    activations = 6 * layers * talk("all-reduce", ("tensor",), wide)
    activations += 4 * layers * talk("all-to-all", ("expert",), wide * model.experts.per_token)
    share = model.num_kv_heads / model.num_heads
    activations += 3 * layers * talk("all-gather", ("context",), 2 * wide * share)
    bubble = (sizes["stage"] - 1) / max(1, rows(config, mesh))
    return (computing + activations) * (1 + bubble) + max(0.0, weights - target.efficiency["overlap"] * computing)


def work(config: Config, target: Target, mesh: dict[str, int], size: Size) -> float:
    """Return the FLOP of a device in a step, with full activation checkpointing."""
    model, tokens = config.model, config.data.global_batch_size * config.data.seq_len
    sizes = {key.removeprefix("mesh."): n for key, n in mesh.items()}
    others = 3 * 6 * model.embed_dim * model.experts.mlp_dim * _masked(config, target, sizes)
    per_token = size.per_token + others * (model.stacked_layers - model.experts.dense_layers)
    return 4 / 3 * per_token * tokens / math.prod(mesh.values())


def _masked(config: Config, target: Target, mesh: dict[str, int]) -> float:
    """Return how many experts are computed per token besides its own, and masked."""
    if not experts.masks(config.model, config.train, mesh, target.described):
        return 0.0
    routed, devices = config.model.experts, mesh["expert"]
    rows = experts.buffered(routed, devices, config.train.expert_buffer)
    return rows * routed.num / devices - routed.per_token

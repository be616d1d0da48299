"""Sentences for the start of a run about what it computes slowly on its devices for want of a kernel."""

from typing import TYPE_CHECKING

from jaxtrain.kernels import slow_paths
from jaxtrain.run.across_context import of
from jaxtrain.sharding import axis_rules, mesh_context
from jaxtrain.train_step.precision import dtype_of

if TYPE_CHECKING:
    from jaxtrain.run import Run


def sentences(run: "Run") -> list[str]:
    """Return a sentence for each slow path with what it costs; none for CPUs and models of the user's own."""
    if run.own is not None:
        return []
    config, mesh, rules, settings = run.config, run.mesh, run.sharded.rules, run.sharded.settings
    model, train, dtype = config.model, config.train, dtype_of(settings.precision)
    across = of(run)
    parts = axis_rules.shards(rules["seq"], mesh)
    with mesh_context.use(mesh, rules, settings.platform):
        found = [slow_paths.attention(
            train.attention, dtype, queries, head_dim, strategy=across.name if across else "", parts=parts,
            packed=not config.data.cross_document_attention, soft_cap=model.attention_cap, sinks=model.sinks,
            windowed=any(model.windows))
            for queries, keys, head_dim, causal in model.attentions(config.data.seq_len) if causal and not keys]
        found.append(slow_paths.precision(settings.precision))
        if experts := model.experts.num:
            width = model.experts.mlp_dim // axis_rules.shards(rules["act_expert_mlp"], mesh)
            held = experts // axis_rules.shards(rules["experts"], mesh)
            found.append("" if train.experts_in_bf16 else slow_paths.narrow_experts(settings.precision))
            found.append(slow_paths.experts(train.grouped_matmul, dtype, held,
                                            model.experts.latent_dim or model.embed_dim, width))
    return [sentence for sentence in dict.fromkeys(found) if sentence]

"""The strategy with which attention that looks back crosses the parts of sequences, for a config on a mesh."""

from jaxtrain.config.schema import Config
from jaxtrain.parallel import strategies
from jaxtrain.sharding import axis_rules, mesh_context
from jaxtrain.sharding.axis_rules import AnyMesh, Rules
from jaxtrain.train_step.precision import dtype_of


def strategy(config: Config, mesh: AnyMesh, rules: Rules, precision: str, platform: str) -> strategies.Strategy | None:
    """Return the strategy of attention that looks back; None if there is none, or rows are whole.

    Raises a UserError if `train.attention` cannot compute it.
    """
    model, parts = config.model, axis_rules.shards(rules["seq"], mesh)
    heads = model.num_heads // axis_rules.shards(rules["act_heads"], mesh)
    looking_back = [one for one in model.attentions(config.data.seq_len) if one[-1]]
    if parts == 1 or not looking_back:
        return None
    with mesh_context.use(mesh, rules, platform):
        decided = [strategies.decide(
            config.mesh.context_strategy, config.train.attention, dtype_of(precision), queries, head_dim,
            stages=mesh.shape["stage"], parts=parts, heads=heads, soft_cap=model.attention_cap,
            packed=True, sinks=model.sinks)[0]
            for queries, _, head_dim, _ in looking_back]
    return decided[0]

"""Keys that do not go with reinforcement learning from the model's own answers (`rl.prompts`)."""

from dataclasses import fields
from typing import Any

from jaxtrain.config.sections.tuning_keys import OF_ANSWERS, PreferenceConfig, RLConfig
from jaxtrain.errors import UserError


def check(config: Any) -> None:
    """Refuse what does not go with `rl.prompts`."""
    c, data, train = config.rl, config.data, config.train
    if config.preference.loss:
        _check_pairs(config.preference, c)
    elif data.global_batch_size % c.group_size:
        raise UserError("data.global_batch_size", f"{data.global_batch_size} answers are not whole groups of "
                        f"rl.group_size={c.group_size}", f"make it a multiple of {c.group_size}")
    if c.exact and c.environment:
        raise UserError("rl.exact", "the answers of a step are drawn as the rows of its batch, and conversations with "
                        "rl.environment turn by turn", "leave one of them out")
    if c.exact and c.replay_routes:
        raise UserError("rl.replay_routes", "with rl.exact the step takes its own routes while it draws answers",
                        "leave one of them out")
    if c.exact and c.sampling_rounds > 1:
        raise UserError("rl.exact", "the answers of a step are drawn as the rows of its batch, and "
                        "rl.sampling_rounds chooses them from several", "leave one of them out")
    if train.epochs:
        raise UserError("train.epochs", "a run on its own answers to rl.prompts makes its data as it goes, so "
                        "that they have no length", "give train.steps")
    if c.max_new_tokens >= data.seq_len // (1 + bool(config.preference.loss)):
        raise UserError("rl.max_new_tokens", f"{c.max_new_tokens} leaves no room for a prompt in data.seq_len="
                        f"{data.seq_len}{' of two answers' * bool(config.preference.loss)}",
                        "raise data.seq_len, or ask for shorter answers")
    for key, value, wanted in (
            ("data.cross_document_attention", data.cross_document_attention, False), ("train.z_loss", train.z_loss, 0),
            ("data.mixture", data.mixture, {}), ("data.stages", data.stages, []),
            # An answer has a row of its own; "best_fit" is what configs/finetune.py sets, for a corpus.
            ("data.packing", data.packing, data.packing if data.packing == "best_fit" else "concat"),
            ("resilience.spikes", config.resilience.spikes == "rollback", False)):
        if value != wanted:
            raise UserError(key, "batches are made of the model's own answers", "leave it out")


# What policy gradients read, and losses of pairs do not.
OF_GRADIENTS = ("exact replay_routes teacher teacher_weight loss ratio surrogate clip clip_high kl entropy baseline "
                "scale gamma gae_lambda value_loss value_clip combine")


def _check_pairs(preference: PreferenceConfig, rl: RLConfig) -> None:
    """Refuse what does not go with a preference loss of pairs of the model's own answers."""
    loss = preference.loss
    if loss in (*OF_ANSWERS, "reward"):
        raise UserError("preference.loss", f"{loss} does not learn from pairs of answers to rl.prompts",
                        "use dpo or another loss of pairs, or leave out one of them")
    if preference.reference != "copy":
        raise UserError("preference.reference", "answers to rl.prompts are not known before the run",
                        "leave it out")
    for key in fields(rl):
        if key.name in OF_GRADIENTS.split() and getattr(rl, key.name) != key.default:
            raise UserError(f"rl.{key.name}", f"preference.loss={loss} does not read it", "leave one of them out")

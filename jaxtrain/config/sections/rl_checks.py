"""Keys that do not go with reinforcement learning from the model's own answers (`rl.prompts`)."""

from dataclasses import fields
from typing import Any

from jaxtrain.config.sections.tuning_keys import OF_ANSWERS, PreferenceConfig, RLConfig
from jaxtrain.errors import UserError


def check(config: Any) -> None:
    """Refuse what does not go with `rl.prompts`."""
    c, data, train = config.rl, config.data, config.train
    _check_sampler(c, bool(config.resilience.elastic))
    _check_several(c)
    if config.preference.loss:
        _check_pairs(config.preference, c)
    elif data.global_batch_size % c.group_size:
        raise UserError("data.global_batch_size", f"{data.global_batch_size} answers are not whole groups of "
                        f"rl.group_size={c.group_size}", f"make it a multiple of {c.group_size}")
    if c.exact and c.environment:
        raise UserError("rl.exact", "the answers of a step are drawn as the rows of its batch, and conversations with "
                        "rl.environment turn by turn", "leave one of them out")
    if c.environment and c.replay_routes:
        raise UserError("rl.replay_routes", "conversations with rl.environment read what was said before anew at each "
                        "turn", "leave one of them out")
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
                "scale credit gamma gae_lambda value_loss value_clip combine correction correction_low correction_high")


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


def _check_sampler(c: RLConfig, elastic: bool) -> None:
    """Refuse keys that do not go with a sampler elsewhere, or with a correction for it."""
    for key, value in (("sampling_rounds", c.sampling_rounds > 1), ("gather_weights", c.gather_weights),
                       ("baseline", c.value_head), ("exact", c.exact), ("replay_routes", c.replay_routes)):
        if (c.sampler or c.sampler_devices) and value:
            raise UserError(f"rl.{key}", f"{getattr(c, key)} is for answers that are made on the run's own mesh",
                            f"leave it out, or leave out rl.sampler{'' if c.sampler else '_devices'}")
    if c.sampler and c.sampler_devices:
        raise UserError("rl.sampler_devices", "with rl.sampler a server answers", "leave one of them out")
    if c.sampler_devices and elastic:
        raise UserError("rl.sampler_devices", "with resilience.elastic the mesh takes all devices that are there",
                        "leave one of them out")
    if c.correction and c.reuse > 1:
        raise UserError("rl.correction", f"it needs the policy before the step, and with rl.reuse={c.reuse} later "
                        "steps have another one", "leave one of them out")


def _check_several(c: RLConfig) -> None:
    """Refuse weights and ways of adding that do not go with the rewards."""
    if c.reward_weights and len(c.reward_weights) != len(c.rewards):
        raise UserError("rl.reward_weights", f"there are {len(c.reward_weights)} weights for "
                        f"{len(c.rewards)} rewards", "give one for each in rl.reward, or leave it out")
    if c.combine == "normalize" and (c.value_head or c.baseline == "others" or c.scale != "group"):
        raise UserError("rl.combine", "normalize compares each reward with the mean and the standard deviation of "
                        "its group", "leave rl.baseline and rl.scale out, or set rl.combine=sum")
    if c.sampling_rounds > 1 and (c.value_head or c.teacher):
        key = "baseline=value" if c.value_head else "teacher"
        raise UserError("rl.sampling_rounds", f"with rl.{key} groups of equal rewards teach something too",
                        "leave it out")
    if c.credit == "turn" and c.combine == "normalize":
        raise UserError("rl.combine", "rl.credit=turn compares sums of rewards, turn by turn", "leave one of them out")
    if c.overlong_buffer > c.max_new_tokens:
        raise UserError("rl.overlong_buffer", f"{c.overlong_buffer} tokens are more than rl.max_new_tokens="
                        f"{c.max_new_tokens}", "give fewer, such as a fifth of it")

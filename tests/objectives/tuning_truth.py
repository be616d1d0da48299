"""Write tests/objectives/tuning_truth.json: what TRL computes of losses of preferences and of policy gradients.

    python -m pip download --no-deps trl==1.0.0
    python -m tests.objectives.tuning_truth trl-1.0.0-py3-none-any.whl

Needs torch and trl, and the wheel of an older version, which had PPO. Inputs are those of `numbers`, which the tests
draw again; TRL's own functions are given them in place of a model's log-probabilities. Of PPO, which is one function,
the lines about advantages and about the loss are executed.
"""

import ast
import inspect
import json
import sys
import textwrap
import zipfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.utils import nanstd

from tests.objectives.tuning_numbers import PAIRS, numbers, scores_of, values

PATH = Path(__file__).with_suffix(".json")
PREFERENCES = {
    "dpo": dict(loss="dpo", beta=0.5), "hinge": dict(loss="hinge", beta=0.5), "ipo": dict(loss="ipo", beta=0.5),
    "robust": dict(loss="robust", beta=0.5, label_smoothing=0.2),
    "simpo": dict(loss="simpo", beta=2.0, margin=0.5, label_smoothing=0.1), "orpo": dict(loss="orpo", beta=0.3),
    "apo_zero": dict(loss="apo_zero", beta=0.5), "apo_down": dict(loss="apo_down", beta=0.5),
    "rpo": dict(loss="dpo", beta=0.5, rpo_alpha=0.7),
    "reward": dict(loss="reward", margin=0.3, center=0.05),
}
KTO = {"kto": dict(loss="kto", beta=0.5, desirable_weight=1.2, undesirable_weight=0.7), "bound": dict(loss="kto")}
POLICIES = {
    "dapo": dict(loss="dapo", clip=0.2, clip_high=0.28), "grpo": dict(loss="grpo", clip=0.2, clip_high=0.2, kl=0.1),
    "dr_grpo": dict(loss="dr_grpo", clip=0.1, clip_high=0.3, kl=0.05),
    "sequence": dict(loss="grpo", clip=0.03, clip_high=0.04, ratio="sequence"),
    "cispo": dict(loss="dapo", surrogate="cispo", clip_high=0.1),
    "cispo, kl": dict(loss="dapo", surrogate="cispo", clip_high=4.0, kl=0.1),
    # Answers that were cut off, with mask_truncated_completions
    **{f"{loss}, truncated": dict(loss=loss, clip=0.2, clip_high=0.28, kl=0.1, truncated=[1, 4])
       for loss in ("dapo", "grpo", "dr_grpo")},
}
GROUPS = 3
REWARDS = {
    "weighted": dict(reward_weights=[1.0, 0.3], group_size=4, max_new_tokens=20),
    "overlong": dict(reward_weights=[1.0, 0.5], group_size=4, max_new_tokens=20, overlong_buffer=8,
                     overlong_penalty=0.7, scale="batch"),
    "normalized": dict(reward_weights=[1.0, 0.3], group_size=4, max_new_tokens=20, overlong_buffer=5,
                       combine="normalize"),
}
PPO = {"ppo": dict(value_clip=0.2, value_loss=0.1), "discounted": dict(gamma=0.9, gae_lambda=0.7, value_loss=1.0)}


class Trainer(SimpleNamespace):
    """The minimal trainer that its loss asks for."""

    def __init__(self, **keys):
        same = lambda x, *_, **__: x  # noqa: E731
        accelerator = MagicMock(gather=same, gather_for_metrics=same, reduce=same, device="cpu", num_processes=1)
        super().__init__(accelerator=accelerator, aux_loss_enabled=False, model=SimpleNamespace(training=True),
                         _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1, **keys)


def preference(keys):
    mask, policy, reference, *_ = (torch.tensor(x) for x in numbers(2 * PAIRS))
    policy.requires_grad_()
    if keys["loss"] == "reward":  # of each token, and read out at the last one
        outputs = SimpleNamespace(logits=policy[range(2 * PAIRS), mask.sum(1) - 1, None])
        trainer = Trainer(args=SimpleNamespace(center_rewards_coefficient=keys["center"]))
        loss = RewardTrainer.compute_loss(trainer, lambda **_: outputs, {
            "margin": torch.full((PAIRS,), keys["margin"]), "attention_mask": mask})
    elif keys["loss"] in ("simpo", "orpo"):
        means = (policy.sum(1) / mask.sum(1)).float()
        chosen, rejected = means.chunk(2)
        if keys["loss"] == "simpo":
            trainer = Trainer(loss_type="simpo", beta=keys["beta"], label_smoothing=keys["label_smoothing"],
                              simpo_gamma=keys["margin"], alpha=0.0)
            loss = CPOTrainer.cpo_loss(trainer, chosen, rejected)[0].mean()
        else:  # it subtracts the odds ratio's term from the cross-entropy of the chosen answers
            loss = (-chosen - ORPOTrainer.odds_ratio_loss(Trainer(beta=keys["beta"]), chosen, rejected)[0]).mean()
    else:
        kinds = {"dpo": "sigmoid"}
        alpha = keys.get("rpo_alpha", 0.0)
        trainer = Trainer(ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", use_weighting=False,
                          loss_types=[kinds.get(keys["loss"], keys["loss"]), *["sft"] * bool(alpha)],
                          loss_weights=[1.0, *[alpha] * bool(alpha)], beta=keys["beta"],
                          label_smoothing=keys.get("label_smoothing", 0.0))
        # One pair at a time with "sft", which weighs all tokens of a batch alike.
        parts = [[pair, PAIRS + pair] for pair in range(PAIRS)] if alpha else [list(range(2 * PAIRS))]
        loss = sum(_dpo(trainer, mask[part], policy[part], reference[part]) for part in parts) / len(parts)
    loss.backward()
    return {"loss": float(loss.detach()), "gradient": policy.grad.tolist()}


def _dpo(trainer, mask, policy, reference):
    """The loss of pairs, of which the first half is chosen."""
    behind, zeros = torch.cat([torch.zeros(len(mask), 1, dtype=bool), mask], 1), torch.zeros(mask.shape)
    outputs = SimpleNamespace(log_probs=policy, entropy=zeros, mean_logits=zeros, is_top1=mask)
    chosen, rejected = reference.sum(1).chunk(2)
    return DPOTrainer._compute_loss(trainer, lambda **_: outputs, {
        "completion_mask": behind.long(), "ref_chosen_logps": chosen, "ref_rejected_logps": rejected,
        "input_ids": behind.long(), "attention_mask": behind.long()}, False)


def kto(keys):
    mask, policy, reference, other, _ = (torch.tensor(x) for x in numbers(2 * PAIRS))
    policy.requires_grad_()
    # TRL asks the model for the log-probabilities of others' answers first. Which of both is larger decides the bound.
    above = (other.sum() > reference.sum()) == (keys != KTO["bound"])
    ours, theirs = (other, reference) if above else (reference, other)
    trainer = Trainer(loss_type="kto", beta=keys.get("beta", 0.1), calculate_KL=True, precompute_ref_logps=True,
                      desirable_weight=keys.get("desirable_weight", 1.0),
                      undesirable_weight=keys.get("undesirable_weight", 1.0),
                      _compute_kl_logps=lambda *_: ours.sum(1))
    behind, zeros = torch.cat([torch.zeros(2 * PAIRS, 1, dtype=bool), mask], 1), torch.zeros(mask.shape)
    outputs = SimpleNamespace(log_probs=policy, entropy=zeros, mean_logits=zeros)
    loss = KTOTrainer._compute_loss(trainer, lambda **_: outputs, {
        "label": torch.arange(2 * PAIRS) % 3 > 0, "completion_mask": behind.long(), "input_ids": behind.long(),
        "attention_mask": behind.long(), "ref_logps": reference.sum(1), "ref_KL_logps": theirs.sum(1)}, False)
    loss.backward()
    return {"loss": float(loss.detach()), "gradient": policy.grad.tolist(), "kl": trainer._metrics["train"]["kl"][0]}


def policy_gradient(keys):
    mask, policy, reference, sampled, advantages = (torch.tensor(x) for x in numbers(2 * PAIRS))
    policy.requires_grad_()
    mask[keys.get("truncated", [])] = False
    args = SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1)
    trainer = Trainer(
        args=args, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=keys.get("kl", 0.0),
        importance_sampling_level=keys.get("ratio", "token"), loss_type=keys.get("surrogate", keys["loss"]),
        epsilon_low=keys.get("clip"), epsilon_high=keys["clip_high"] + ("surrogate" in keys), use_vllm=False,
        current_gradient_accumulation_steps=1, max_completion_length=20,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, torch.zeros(mask.shape), None))
    loss = GRPOTrainer._compute_loss(trainer, None, {
        "prompt_ids": mask.long(), "prompt_mask": mask.long(), "completion_ids": mask.long(),
        "completion_mask": mask.long(), "advantages": advantages, "old_per_token_logps": sampled,
        "ref_per_token_logps": reference, "num_items_in_batch": mask.sum()})
    loss.backward()
    return {"loss": float(loss.detach()), "gradient": policy.grad.tolist()}


def rewards(keys):
    """The advantages of answers with several rewards, and with a penalty for length."""
    scores, lengths = torch.tensor(scores_of(GROUPS, keys["group_size"])[0]), scores_of(GROUPS, keys["group_size"])[1]
    if keys.get("overlong_buffer"):
        soft = get_soft_overlong_punishment(keys["max_new_tokens"], keys["overlong_buffer"])
        scores = torch.cat([scores, torch.tensor(soft([[0] * n for n in lengths]), dtype=scores.dtype)[:, None]], 1)
    weights = torch.tensor([*keys["reward_weights"], *[keys.get("overlong_penalty", 1.0)] * (scores.shape[1] - 2)],
                           dtype=scores.dtype)
    owner = Trainer(scale_rewards=keys.get("scale", "group"), reward_funcs=weights, reward_weights=weights,
                    multi_objective_aggregation={"sum": "sum_then_normalize", "normalize": "normalize_then_sum"}[
                        keys.get("combine", "sum")])
    known = {"torch": torch, "nanstd": nanstd, "self": owner, "rewards_per_func": scores, "device": "cpu",
             "num_generations": keys["group_size"]}
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    exec(_lines(source, "unscorable_mask = torch.isnan(rewards_per_func).all(dim=1)",
                "advantages = torch.nan_to_num(advantages, nan=0.0)"), known)
    return {"advantages": known["advantages"].tolist()}


def ppo(source, keys):
    functions = [node for node in ast.parse(source).body if getattr(node, "name", "").startswith("masked_")]
    mask, policy, _, sampled, rewards = (torch.tensor(x) for x in numbers(2 * PAIRS))
    before, now = (torch.tensor(x) for x in values(2 * PAIRS))
    policy.requires_grad_()
    now.requires_grad_()
    last = torch.zeros(mask.shape, dtype=torch.float64)
    last[range(2 * PAIRS), mask.sum(1) - 1] = rewards
    known = {"torch": torch, "args": SimpleNamespace(
        gamma=keys.get("gamma", 1.0), lam=keys.get("gae_lambda", 0.95), cliprange=0.2, cliprange_value=0.2,
        vf_coef=keys["value_loss"]), "responses": mask, "values": before, "rewards": last, "padding_mask": ~mask}
    exec(compile(ast.Module(functions, []), "trl", "exec"), known)
    exec(_lines(source, "lastgaelam = 0", "advantages = torch.masked_fill(advantages, padding_mask, 0)"), known)
    known |= {"mb_advantage": known["advantages"], "mb_return": known["returns"] * mask, "mb_values": before,
              "mb_logprobs": sampled, "new_logprobs": policy, "vpred": now, "micro_batch_inds": slice(None),
              "padding_mask_p1": ~mask}
    exec(_lines(source, "vpredclipped = torch.clamp(", "loss = pg_loss + args.vf_coef * vf_loss"), known)
    known["loss"].backward()
    return {"loss": float(known["loss"].detach()), "gradient": policy.grad.tolist(), "values": now.grad.tolist(),
            "value_loss": float(known["vf_loss"].detach()), "value_clipped": float(known["vf_clipfrac"].detach()),
            **{name: known[name].tolist() for name in ("advantages", "returns")}}


def _lines(source, first, last):
    """The lines of a function from one to another."""
    lines = source.splitlines()
    begin, end = ([line.strip() for line in lines].index(text) for text in (first, last))
    return textwrap.dedent("\n".join(lines[begin:end + 1]))


def main():
    wheel = Path(sys.argv[1])
    source = zipfile.ZipFile(wheel).read("trl/experimental/ppo/ppo_trainer.py").decode()
    found = {"versions": {name: version(name) for name in ("torch", "trl")} | {"ppo": wheel.name.split("-")[1]},
             "preference": {name: {"keys": keys, **preference(keys)} for name, keys in PREFERENCES.items()},
             "kto": {name: {"keys": keys, **kto(keys)} for name, keys in KTO.items()},
             "policy_gradient": {name: {"keys": keys, **policy_gradient(keys)} for name, keys in POLICIES.items()},
             "rewards": {name: {"keys": keys, **rewards(keys)} for name, keys in REWARDS.items()},
             "ppo": {name: {"keys": keys, **ppo(source, keys)} for name, keys in PPO.items()}}
    PATH.write_text(json.dumps(found) + "\n")
    print({kind: {name: round(one.get("loss", 0), 5) for name, one in found[kind].items()} for kind in list(found)[1:]})


if __name__ == "__main__":
    main()

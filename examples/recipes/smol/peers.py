"""Train a published model by transformers, PEFT and TRL on the batches of a run, and compare the losses of each step.

    python examples/recipes/smol/peers.py start FOLDER ADAPTERS --seed=0       # adapters to begin with, by PEFT
    python examples/recipes/smol/peers.py train FOLDER WORKDIR --output=OUT    # writes OUT/metrics.jsonl
    python examples/recipes/smol/peers.py train FOLDER WORKDIR --adapters=ADAPTERS --output=OUT
    python examples/recipes/smol/peers.py read EXPORTED WORKDIR --output=OUT   # the next loss, of an exported model

Needs torch, transformers, peft and trl, and WORKDIR/batches.npz (batches.py). Each document of a packed row becomes a
row of its own.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM


def documents(batch):
    """Return the documents of a batch, one a row, as tokens, targets and weights; of pairs, the chosen ones first."""
    rows = [(row, segment) for row, segments in enumerate(batch["segments"])
            for segment in range(1, segments.max() + 1)]
    rows.sort(key=lambda one: one[1] % 2 == 0)  # pairs have an even number of segments
    longest = max(int((batch["segments"][row] == segment).sum()) for row, segment in rows)
    found = {name: np.zeros((len(rows), longest), batch[name].dtype) for name in ("tokens", "targets", "weights")}
    for at, (row, segment) in enumerate(rows):
        here = batch["segments"][row] == segment
        for name, column in found.items():
            column[at, :here.sum()] = batch[name][row][here]
    return {name: torch.from_numpy(column) for name, column in found.items()}


def log_probabilities(model, one):
    """Return the log-probability of each target; what is behind a document is not attended to by it."""
    logits = model(input_ids=one["tokens"].long(), use_cache=False).logits.float()
    return torch.gather(logits.log_softmax(-1), 2, one["targets"].long()[..., None])[..., 0]


def answers_loss(model, one):
    """Return the mean loss of the tokens that are trained on."""
    return -(log_probabilities(model, one) * one["weights"]).sum() / one["weights"].sum()


def pairs_loss(model, one, beta):
    """Return TRL's loss of pairs; the reference is the model without its adapters."""
    from trl import DPOTrainer

    same = lambda x, *_, **__: x  # noqa: E731
    accelerator = MagicMock(gather=same, gather_for_metrics=same, reduce=same, device="cpu", num_processes=1)
    trainer = SimpleNamespace(
        accelerator=accelerator, aux_loss_enabled=False, model=SimpleNamespace(training=True), _tp_size=1,
        _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", use_weighting=False, loss_types=["sigmoid"],
        loss_weights=[1.0], beta=beta, label_smoothing=0.0)
    mask = one["weights"] > 0
    with torch.no_grad(), model.disable_adapter():
        chosen, rejected = (log_probabilities(model, one) * mask).sum(1).chunk(2)
    policy, zeros = log_probabilities(model, one) * mask, torch.zeros(mask.shape)
    outputs = SimpleNamespace(log_probs=policy, entropy=zeros, mean_logits=zeros, is_top1=mask)
    behind = torch.cat([torch.zeros(len(mask), 1, dtype=bool), mask], 1).long()
    return DPOTrainer._compute_loss(trainer, lambda **_: outputs, {
        "completion_mask": behind, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected, "input_ids": behind,
        "attention_mask": behind}, False)


def loss_of(config):
    """Return the loss of a batch by the config of a run."""
    if config["preference"]["loss"] == "dpo":
        return lambda model, one: pairs_loss(model, one, config["preference"]["beta"])
    return answers_loss


def train(flags, config, ours, batches):
    """Train on the run's batches with its learning rates, and return a line for each step."""
    model = AutoModelForCausalLM.from_pretrained(flags.folder, dtype=torch.float32).train()
    if flags.adapters:
        model = peft.PeftModel.from_pretrained(model, flags.adapters, is_trainable=True).train()
    trained = [one for one in model.parameters() if one.requires_grad]
    c, loss = config["optimizer"], loss_of(config)
    adam = torch.optim.AdamW(trained, betas=(c["b1"], c["b2"]), eps=c["eps"], weight_decay=c["weight_decay"])
    for line in ours:
        adam.param_groups[0]["lr"] = line["learning_rate"]
        value = loss(model, documents(batches(line["step"] - 1)))
        adam.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(trained, c["clip_norm"])
        adam.step()
        yield {"step": line["step"], "loss": float(value.detach()), "apart": abs(float(value.detach()) - line["loss"])}
    if not flags.adapters:
        with torch.no_grad():
            after = float(loss(model, documents(batches(len(ours)))))
        (flags.workdir / "next_loss.json").write_text(json.dumps(after))


def read(flags, config, ours, batches):
    """Return a line with the loss of an exported model on the next batch, beside that of the peer's own weights."""
    model = AutoModelForCausalLM.from_pretrained(flags.folder, dtype=torch.float32).eval()
    with torch.no_grad():
        value = float(loss_of(config)(model, documents(batches(len(ours)))))
    theirs = json.loads((flags.workdir / "next_loss.json").read_text())
    yield {"step": len(ours) + 1, "loss": value, "apart": abs(value - theirs)}


def start(flags):
    """Write adapters as PEFT begins with them, on all linear layers."""
    torch.manual_seed(flags.seed)
    model = AutoModelForCausalLM.from_pretrained(flags.folder, dtype=torch.float32)
    keys = {"r": 16, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    peft.get_peft_model(model, peft.LoraConfig(**keys)).save_pretrained(flags.workdir)


def main():
    """Do one of the three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("way", choices=("start", "train", "read"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--adapters", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    if flags.way == "start":
        return start(flags)
    config = json.loads((flags.workdir / "config.json").read_text())
    lines = map(json.loads, (flags.workdir / "metrics.jsonl").read_text().splitlines())
    ours = [line for line in lines if "loss" in line]
    kept = np.load(flags.workdir / "batches.npz")
    lines = {"train": train, "read": read}[flags.way](
        flags, config, ours, lambda step: {name: kept[name][step] for name in kept.files})
    flags.output.mkdir(parents=True, exist_ok=True)
    (flags.output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()

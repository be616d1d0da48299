"""The terms of other frameworks: the names here, of which `errors.nearest` suggests those known in the place.

A value with a space is a sentence, which is shown as it is.
"""

_NAMES = {
    "learning_rate": "lr max_lr peak_lr learningrate",
    "global_batch_size": "batch_size bs train_batch_size",
    "seq_len": "sequence_length seq_length context_length block_size max_seq_length max_target_length max_length",
    "steps": "max_steps num_steps train_steps total_steps max_iters train_iters num_train_steps iterations",
    "patience": "early_stopping early_stopping_patience early_stop early_stopping_steps",
    "accumulation": "grad_accum gradient_accumulation gradient_accumulation_steps grad_accumulation_steps",
    "warmup_steps": "warmup warmup_iters lr_warmup_steps num_warmup_steps",
    "clip_norm": "grad_clip clip_grad max_grad_norm gradient_clipping gradient_clip_val",
    "b1": "beta1 adam_beta1", "b2": "beta2 adam_beta2", "eps": "epsilon adam_eps adam_epsilon",
    "num_layers": "n_layer n_layers layers num_hidden_layers depth",
    "embed_dim": "n_embd d_model hidden_size width dim",
    "num_heads": "n_head n_heads heads num_attention_heads", "num_kv_heads": "n_kv_heads num_key_value_heads",
    "mlp_dim": "intermediate_size ffn_hidden_size d_ff", "eval_every": "eval_interval eval_steps eval_freq",
    "checkpoint.every": "save_every save_steps save_interval save_freq checkpoint_interval",
    "remat": "activation_checkpointing gradient_checkpointing recompute remat_policy",
    "precision": "dtype mixed_precision", "ema_decay": "ema ema_rate model_ema_decay polyak_decay",
    "zero_stage": "zero zero_optimization", "workdir": "output_dir out_dir",
    "bfloat16": "bf16", "float16": "fp16 half", "float32": "fp32 full_precision",
    "cudnn": "flash flash_attention flash_attention_2 fa2 fa3 sdpa", "zb_v": "dualpipe dualpipev zbv zero_bubble",
    "interleaved": "vpp interleaved_1f1b virtual", "data": "ddp dp data_parallel", "fsdp": "zero3 fully_sharded",
    "tensor": "tp mp model_parallel", "stage": "pp pipeline_parallel", "context": "cp sp sequence context_parallel",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler lr_schedule scheduler",
    "log_every": "logging_steps log_interval log_freq", "keep": "save_total_limit keep_last max_to_keep",
    "trackers": "report_to", "alpha": "lora_alpha", "dropout": "lora_dropout", "rank": "r lora_r lora_rank",
    "targets": "target_modules lora_target_modules", "dora": "use_dora",
    "rank_stabilized": "use_rslora rslora", "init": "init_lora_weights",
    "nf4": "int4 4bit fp4 load_in_4bit", "int8": "8bit load_in_8bit",
    "max_new_tokens": "max_tokens max_completion_length max_completion_tokens response_length",
    "mask_truncated": "mask_truncated_completions overlong_filtering overlong_filter",
    "group_size": "num_generations rollouts_per_prompt", "reuse": "num_iterations ppo_epochs num_ppo_epochs",
    "environment": "environment_factory env_id tool_env", "max_turns": "max_assistant_turns",
    "kl": "kl_coef kl_coeff init_kl_coef", "clip": "epsilon_low cliprange", "clip_high": "epsilon_high",
    "accelerators_per_node": "gpus gpus_per_node ngpus num_gpus gres", "queue": "partition", "priority": "qos",
    "time": "walltime time_limit", "processes_per_node": "ntasks_per_node nproc_per_node", "memory_gb": "mem",
    "cpus_per_process": "cpus_per_task", "image": "container", "value_loss": "vf_coef vf_coeff value_coef",
    "gae_lambda": "lam", "value_clip": "cliprange_value", "reference": "precompute_ref_log_probs",
    "dpo": "sigmoid", "licence": "license",
    "diloco": "islands", "rl": "reinforce", "images": "pictures", "image_flow": "picture_flow",
    "images_per_row": "pictures_per_row", "image_field": "picture_field image_column",
    **{f"image_{end}": f"picture_{end}" for end in ("layers", "embed_dim", "heads", "mlp_dim", "norm_eps", "size")},
    "expert": "ep expert_parallel", "full": "everything nothing_saveable", "adamw": "adam adam_w",
}
SYNONYMS = {other: name for name, others in _NAMES.items() for other in others.split()}
SYNONYMS |= dict.fromkeys(
    ("per_device_batch_size", "per_device_train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu"),
    "data.global_batch_size counts the rows of a step on all devices together, and train.accumulation=N computes them "
    "in N parts")
SYNONYMS |= dict.fromkeys(
    ("warmup_ratio", "warmup_fraction"),
    "optimizer.warmup_steps takes a fraction of the run's steps, too, such as 0.03")
SYNONYMS |= dict.fromkeys(
    ("ppo", "grpo", "rloo", "gspo"),
    "learning from rewards is set by the rl keys, see docs/rl.md")
SYNONYMS |= dict.fromkeys(
    ("epochs", "num_epochs", "num_train_epochs", "max_epochs"),
    "train.epochs is the length of a run in passes over its data; data.mixture.NAME.epochs limits one source of a "
    "mixture")
SYNONYMS |= dict.fromkeys(
    ("pushgateway", "push_gateway", "prometheus_pushgateway", "prometheus_gateway", "pushgateway_url"),
    "there is no Pushgateway: it keeps the last values of a process that has died, and so hides the failures that "
    "count; let Prometheus scrape observe.prometheus_port, or set observe.prometheus_textfile")
SYNONYMS |= dict.fromkeys(
    ("prometheus", "grafana"),
    "set observe.prometheus_port, from which Prometheus reads; see docs/observe-prometheus.md")

"""Export a run's model as a folder in Hugging Face's format.

    jaxtrain export WORKDIR --output=FOLDER
    jaxtrain export WORKDIR --output=FOLDER --step=500 --dtype=float32
    jaxtrain export WORKDIR --output=FOLDER --licence=apache-2.0 --gates refusals.jsonl regressions.jsonl
    jaxtrain export WORKDIR --output=FOLDER --ema

Transformers and inference servers can load it. The folder appears when it is complete: config.json, the weights as
safetensors, the tokenizer if other programs can read it, a model card, and export.json, which records the
run, the step and the SHA-256 of every file.

With --gates, the folder counts as releasable only if the model's answers to prompts pass; exit status 1: they do
not.
"""

from pathlib import Path

from jaxtrain.base import exit_statuses
from jaxtrain.commands.flags import add_dry_run, add_overwrite, add_process_flags, command, parser_of
from jaxtrain.errors import UserError, say, tell
from jaxtrain.hub.export import answers_file, export, planned
from jaxtrain.pages.plain_text import in_bytes


@command()
def main(argv: list[str] | None = None) -> None:
    """Parse the flags and export."""
    parser = parser_of("export", __doc__)
    parser.add_argument("workdir", metavar="WORKDIR", help="workdir of the run")
    parser.add_argument("--output", dest="to", required=True, metavar="FOLDER", help="a new folder for the model")
    add_overwrite(parser, "an earlier export in that folder")
    add_dry_run(parser, "check the run, the checkpoint and the folder, say what would be written, and stop")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest verified one")
    parser.add_argument("--ema", action="store_true", help="use the moving average of the weights (train.ema_decay)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of the weights")
    parser.add_argument("--file_gb", type=float, default=4.0, help="maximum size of a weights file, in 10^9 bytes")
    parser.add_argument("--licence", "--license", default="", help="licence for the model card, such as apache-2.0")
    parser.add_argument("--gates", metavar="FILE", nargs="+", default=[],
                        help="JSON lines of prompts with must_match or must_not_match patterns for the answers")
    parser.add_argument("--gate_share", type=float, default=1.0,
                        help="share of each gate file's prompts that must pass")
    add_process_flags(parser)
    flags = parser.parse_args(argv)
    if flags.gate_share != 1 and not flags.gates:
        raise UserError("--gate_share", "it is read with --gates only", "give that too, or leave it out")
    if not 0 < flags.gate_share <= 1:
        raise UserError("--gate_share", f"{flags.gate_share} is not in (0, 1]", "give one such as 0.95")
    if not 0 <= flags.file_gb < 1e6:
        raise UserError("--file_gb", f"{flags.file_gb} is not the size of a file", "give one such as 4")
    from jaxtrain.distributed import processes

    processes.initialize(flags.coordinator, flags.num_processes, flags.process_id)
    if flags.dry_run:
        plan = planned(flags.workdir, flags.to, flags.step, dtype=flags.dtype, gates=flags.gates,
                       overwrite=flags.overwrite)
        tell(f"step {plan['step']} of {flags.workdir} would be written to {flags.to}: {plan['parameters']:,} "
             f"parameters, {in_bytes(plan['bytes'])} in {flags.dtype}")
        return
    record = export(flags.workdir, flags.to, flags.step, dtype=flags.dtype, file_bytes=int(flags.file_gb * 1e9),
                    averaged=flags.ema, licence=flags.licence, gates=flags.gates, gate_share=flags.gate_share,
                    overwrite=flags.overwrite)
    say(f"{flags.to} has the model of step {record['step']} of {flags.workdir}")
    for suite, counts in record.get("gates", {}).get("suites", {}).items():
        say(f"gates: {suite}: {counts['passed']} of {counts['checks']} passed")
    if not record.get("gates", {}).get("releasable", True):
        say(f"it is not releasable; the answers are in {answers_file(Path(flags.workdir), record['step'], flags.ema)}")
        raise SystemExit(exit_statuses.NO)

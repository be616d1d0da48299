"""Evaluate a trained or published model on tasks of lm-evaluation-harness.

    jaxtrain evaluate WORKDIR --tasks=hellaswag,arc_easy --num_fewshot=5
    jaxtrain evaluate WORKDIR --tasks=mine --include=tasks/ --limit=100
    jaxtrain evaluate WORKDIR --tasks=mine --include=tasks/ --watch
    jaxtrain evaluate hf:ORG/NAME --tasks=hellaswag --output=hellaswag.json
    jaxtrain evaluate FOLDER --tasks=mine --include=tasks/ --adapters=formal=FOLDER,brief=FOLDER --output=mine.json

Prints a table, and writes the results, settings, seeds, versions and the hash of every prompt to
WORKDIR/evaluations/STEP.json (for a published folder, to --output). With --watch it evaluates each new verified
checkpoint of a run while it trains, writes the results to WORKDIR/evaluations/metrics.jsonl and the run's trackers, and
ends after the run's last step. With --adapters each adapter is evaluated separately; results go to STEP-NAME.json.
"""

import argparse
from dataclasses import fields

from jaxtrain.commands.flags import add_json, add_process_flags, command, folders_by_name, overrides_of, parser_of
from jaxtrain.config.hub_names import model_folder
from jaxtrain.errors import UserError
from jaxtrain.hub.evaluate_tasks import Settings, Tasks, check_folder, evaluate, watch
from jaxtrain.hub.folders import task_names


@command()
def main(argv: list[str] | None) -> None:
    """Run the command; exit status 2 means a user error, reported in one line."""
    flags, overrides = parse(argv)
    task_names.check([name for name in flags.tasks.split(",") if name], flags.include)
    flags.model, flags.workdir = flags.workdir, model_folder(flags.workdir)
    check_folder(flags.workdir)
    from jaxtrain.distributed import processes

    processes.initialize(flags.coordinator, flags.num_processes, flags.process_id)
    settings = Settings(**{field.name: getattr(flags, field.name) for field in fields(Settings)})
    tasks = Tasks.of(settings)
    if flags.watch:
        watch(settings, overrides, tasks)
    else:
        evaluate(settings, overrides, tasks, flags.step)


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return the parsed flags and the dotted config overrides."""
    parser = parser_of("evaluate", __doc__)
    parser.add_argument("workdir", metavar="WORKDIR", help="the workdir of a run, a folder in Hugging Face's "
                        "format, or hf:ORG/NAME on the Hugging Face Hub")
    parser.add_argument("--tasks", required=True, help="names of tasks or groups of tasks, separated by commas")
    parser.add_argument("--include", metavar="FOLDER", help="folder with YAML files of your own tasks")
    parser.add_argument("--num_fewshot", type=int, help="few-shot examples before each question; default: the task's")
    parser.add_argument("--limit", type=float, help="number of examples of each task or, below 1, share of them")
    parser.add_argument("--gen_kwargs", help="generation settings instead of the task's own, such as "
                                             "temperature=0.7,max_gen_toks=100")
    parser.add_argument("--chat", action="store_true", help="apply the chat template to prompts")
    parser.add_argument("--chat_template", default="", help="a Jinja file, plain or chatml; default: the run's own")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest verified one")
    parser.add_argument("--ema", action="store_true",
                        help="use the moving average of the weights (train.ema_decay); results go to STEP-ema.json")
    parser.add_argument("--batch_size", type=int, default=64, help="texts per batch; default: 64")
    parser.add_argument("--seed", type=int, default=0, help="seed of few-shot examples and sampling; default: 0")
    parser.add_argument("--adapters", metavar="NAME=FOLDER,...",
                        help="adapters in PEFT's format, each of which is evaluated separately")
    parser.add_argument("--output", metavar="FILE", help="file for the results; default: WORKDIR/evaluations/STEP.json")
    parser.add_argument("--log_samples", action="store_true", help="also write every prompt and answer")
    parser.add_argument("--watch", action="store_true", help="evaluate each new verified checkpoint of a running run")
    add_json(parser, "print what is written to the file as a JSON object for each evaluation, in place of tables")
    add_process_flags(parser)
    parser.group("tasks", "tasks", "include", "num_fewshot", "limit", "gen_kwargs", "chat", "chat_template", "seed")
    parser.group("model", "step", "ema", "adapters", "batch_size")
    parser.group("results", "output", "log_samples", "watch", "json")
    flags, rest = parser.parse_known_args(argv)
    flags.adapters = None if flags.adapters is None else folders_by_name(flags.adapters)
    overrides = overrides_of(rest, vars(flags))
    free = "mesh.", "train.precision", *(("observe.trackers",) if flags.watch else ())
    if "observe.trackers" in overrides and not flags.watch:
        raise UserError("--config.observe.trackers", "it is read with --watch only", "add that, or leave it out")
    if other := next((key for key in overrides if not key.startswith(free)), None):
        raise UserError(f"--config.{other}", "it cannot be changed after training",
                        "set only --config.mesh.KEY or --config.train.precision")
    for key, given in (("--step", flags.step is not None), ("--output", flags.output),
                       ("--adapters", flags.adapters)):
        if flags.watch and given:
            raise UserError(key, "--watch evaluates all new checkpoints", "remove it")
    for key, wrong, fix in (
            ("batch_size", flags.batch_size < 1, "give 1 or more"),
            ("seed", not 0 <= flags.seed < 2**32, "give 0 or more"),
            ("limit", flags.limit is not None and not flags.limit > 0, "give a number above 0"),
            ("num_fewshot", flags.num_fewshot is not None and flags.num_fewshot < 0, "give 0 or more"),
            ("tasks", not flags.tasks.strip(","), "name some"),
            ("gen_kwargs", any("=" not in part for part in (flags.gen_kwargs or "=").strip(",").split(",")),
             "give KEY=VALUE,..."),
            ("adapters", any("/" in name for name in flags.adapters or ()), "files have these names: without a slash"),
            ("chat_template", flags.chat_template and not flags.chat, "add --chat")):
        if wrong:
            raise UserError(f"--{key}", f"{getattr(flags, key)!r} is not valid", fix)
    return flags, overrides

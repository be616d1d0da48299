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
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.config.hub_names import model_folder
from jaxtrain.errors import UserError, install_extra, say, tell
from jaxtrain.files.bounded_files import user_json
from jaxtrain.flags import add_process_flags, command, overrides_of, parser_of
from jaxtrain.hub.folders import task_names
from jaxtrain.hub.generate_texts import named

if TYPE_CHECKING:
    from jaxtrain.observe.trackers.results_log import ResultsLog

FOLDER = "evaluations"  # of a workdir
PAUSE = 10.0  # seconds between looks for a new checkpoint


@command()
def main(argv: list[str] | None) -> None:
    """Run the command; exit status 2 means a user error, reported in one line."""
    flags, overrides = parse(argv)
    task_names.check([name for name in flags.tasks.split(",") if name], flags.include)
    flags.model, flags.workdir = flags.workdir, model_folder(flags.workdir)
    _check_folder(flags.workdir)
    from jaxtrain.distributed import processes

    processes.initialize(flags.coordinator, flags.num_processes, flags.process_id)
    tasks = Tasks.of(flags)
    if flags.watch:
        _watch(flags, overrides, tasks)
    else:
        _evaluate(flags, overrides, tasks, flags.step)


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
    parser.add_argument("--samples", action="store_true", help="also write every prompt and answer")
    parser.add_argument("--watch", action="store_true", help="evaluate each new verified checkpoint of a running run")
    add_process_flags(parser)
    parser.group("tasks", "tasks", "include", "num_fewshot", "limit", "gen_kwargs", "chat", "chat_template", "seed")
    parser.group("model", "step", "ema", "adapters", "batch_size")
    parser.group("results", "output", "samples", "watch")
    flags, rest = parser.parse_known_args(argv)
    flags.adapters = None if flags.adapters is None else named(flags.adapters)
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


def _check_folder(folder: str) -> None:
    """Refuse a folder without a model, before the harness is imported, which takes long."""
    if Path(folder).is_dir() and not any((Path(folder) / name).is_file() for name in (
            "config.json", "adapter_config.json")):
        raise UserError("WORKDIR", f"{folder} has no config.json", "give the workdir of a run, or a published folder")


@dataclass(frozen=True)
class Tasks:
    """Tasks of the harness, and the settings to run them with."""

    names: list[str]
    manager: Any
    flags: argparse.Namespace

    @classmethod
    def of(cls, flags: argparse.Namespace) -> "Tasks":
        """Find the tasks; refuse names that are not known."""
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise UserError("--tasks", f"they need the package lm_eval ({error})", install_extra("eval")) from error
        if flags.include and not Path(flags.include).is_dir():
            raise UserError("--include", f"{flags.include} is not a folder", "name the one with the tasks' YAML files")
        manager = TaskManager(include_path=flags.include)
        names = [name for name in flags.tasks.split(",") if name]
        if unknown := [name for name in names if not manager.match_tasks([name])]:
            raise UserError("--tasks", f"there is no task {unknown[0]!r}", "see lm-eval ls tasks, or name the folder "
                            "of your own by --include")
        return cls(names, manager, flags)

    def ask(self, model: Any) -> JsonObject:
        """Return the harness's results for a model."""
        flags = self.flags
        try:
            found = self._results(model, flags)
        except UserError:
            raise
        except (ValueError, TypeError) as error:  # the harness's own checks of its settings
            raise UserError("--tasks", f"the harness refuses this ({error})", "check --num_fewshot and --gen_kwargs"
                            ) from error
        except OSError as error:
            raise UserError("--tasks", f"their data cannot be read ({error})", "check the network, or the paths in the "
                            "task's YAML file, which begin in the folder where this command is started") from error
        assert found is not None
        return found

    def _results(self, model: Any, flags: argparse.Namespace) -> JsonObject | None:
        from lm_eval import simple_evaluate

        return simple_evaluate(
            model, tasks=self.names, task_manager=self.manager, num_fewshot=flags.num_fewshot, limit=flags.limit,
            gen_kwargs=flags.gen_kwargs, apply_chat_template=flags.chat, log_samples=True, random_seed=flags.seed,
            numpy_random_seed=flags.seed, torch_random_seed=flags.seed, fewshot_random_seed=flags.seed,
            bootstrap_iters=1000)


def _watch(flags: argparse.Namespace, overrides: dict[str, str], tasks: Tasks) -> None:
    """Evaluate every good checkpoint that has no results yet, in order, until the run's last step is among them."""
    from jaxtrain.distributed.coordination import exchange
    from jaxtrain.hub.trained_model import sections_of

    sections = sections_of(flags.workdir)
    last = sections.get("train", {}).get("steps")
    if last is None:
        raise UserError("--watch", f"{flags.workdir} is not the workdir of a run", "leave it out")
    with _results_log(flags, sections, overrides) as log:
        while True:
            step, ended = exchange(None, lambda _: _next(flags, last, log))
            if step is None and ended:
                return
            if step is None:
                time.sleep(PAUSE)
                continue
            try:
                _evaluate(flags, overrides, tasks, step)
            except UserError:
                if exchange(None, lambda _, step=step: step in _good(flags)):
                    raise
                say(f"the checkpoint of step {step} was deleted before it was read; give checkpoint.keep more of them")


def _good(flags: argparse.Namespace) -> dict[int, JsonObject]:
    """Return what `good.json` says of each good checkpoint, by step."""
    from jaxtrain.checkpoint import verify

    folder = Path(flags.workdir) / "checkpoints"
    return {step: record for step in verify.steps(folder) if (record := verify.good(folder, step))}


def _next(flags: argparse.Namespace, last: int, log: "ResultsLog") -> tuple[int | None, bool]:
    """Return the first good step without results, if any, and whether the last one is there; logs those before it."""
    good = _good(flags)
    for step, record in good.items():
        if _results(flags, step, record) is None:
            return step, False
        log.add(step)
    return None, last in good


@contextlib.contextmanager
def _results_log(flags: argparse.Namespace, sections: JsonMapping,
                 overrides: dict[str, str]) -> Iterator["ResultsLog"]:
    """Yield the log of the results, which the run's trackers follow as a run of its own."""
    import jax

    from jaxtrain.config.load import make_config
    from jaxtrain.distributed.run_lock import locked
    from jaxtrain.observe import trackers
    from jaxtrain.observe.trackers.results_log import ResultsLog
    from jaxtrain.observe.trackers.tracker import About
    from jaxtrain.redaction import redacted

    workdir, suffix = Path(flags.workdir).absolute(), f"{FOLDER}{'-ema' * flags.ema}"
    run = user_json(workdir / "run.json", {"run?": str}, "WORKDIR", "give the workdir of a run") or {}
    kept = {key: value for key, value in sections.get("observe", {}).items() if key in ("trackers", "project", "name")}
    own = {key: overrides.pop(key) for key in list(overrides) if key.startswith("observe.")}
    options = {name: sections[name] for name in make_config({"observe": kept}, own).plug_ins if name in sections}
    config = make_config({"observe": kept, **options}, own)
    c = config.observe
    trackers.check(c.trackers)
    folder = workdir / FOLDER / ("ema" * flags.ema)
    about = About(f"{run.get('run', workdir.name)}-{suffix}", f"{redacted(c.name) or workdir.name}-{suffix}",
                  redacted(c.project), folder, redacted({**sections, "asked": _asked(flags)}), redacted(run))
    with contextlib.ExitStack() as opened:
        if jax.process_index() == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError("--watch", f"{folder} cannot be written ({error.strerror})", "move it away") from error
            if other := opened.enter_context(locked(folder, 0.0)):
                raise UserError("--watch", f"another process watches {flags.workdir} ({other})",
                                "end that one, or ask it for all tasks")
        yield opened.enter_context(ResultsLog(
            about, lambda: [trackers.made(name, config.plug_ins.get(name)) for name in c.trackers],
            lambda step: _results(flags, step)))


def numbers_of(results: Mapping[str, JsonMapping]) -> dict[str, float]:
    """Return the harness's numbers by one name each: of a metric such as `acc,none` without the filter `none`."""
    found = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            metric, _, kind = key.partition(",")
            if kind and isinstance(value, int | float) and not metric.endswith("_stderr"):
                found["_".join(["eval", task, metric, *([kind] if kind != "none" else [])])] = float(value)
    return found


def _asked(flags: argparse.Namespace) -> JsonObject:
    """Return what was asked, as results keep it."""
    return {key: getattr(flags, key) for key in ("tasks", "num_fewshot", "limit", "gen_kwargs", "chat", "seed")}


def _results(flags: argparse.Namespace, step: int, good: JsonMapping | None = None) -> dict[str, float] | None:
    """Return the numbers of a step, if the same tasks were asked in the same way.

    `good`: the content of its checkpoint's `good.json`, of whose parameters they have to be; None: of any.
    """
    from jaxtrain.checkpoint.restore import fingerprint_of

    found = user_json(_results_path(flags, step), {"results?": {str: dict}}, "--watch", "remove it")
    if found is None or found.get("asked") != _asked(flags) or (
            good is not None and found.get("parameters") != fingerprint_of(good)):
        return None
    return numbers_of(found.get("results", {}))


def _evaluate(flags: argparse.Namespace, overrides: dict[str, str], tasks: Tasks, step: int | None) -> None:
    import jax

    from jaxtrain.hub import trained_model
    from jaxtrain.hub.generate_texts import chat_of
    from jaxtrain.hub.harness_model import HarnessModel
    from jaxtrain.hub.trained_tokenizer import tokenizer_of

    sections, words = trained_model.sections_of(flags.workdir, text=True), tokenizer_of(flags.workdir)
    chat = chat_of(flags.workdir, sections, words, flags.chat_template) if flags.chat else None
    run, state, found = trained_model.load_with_origin(flags.workdir, overrides, step, flags.ema, flags.adapters)
    if not run.config.model.text:
        raise UserError("WORKDIR", f"its model is {run.config.model.name}, which is not a decoder of text",
                        "give one of text")
    for name in flags.adapters or [None]:
        results = tasks.ask(HarnessModel(run, state, words, chat=chat, batch_size=flags.batch_size, seed=flags.seed,
                                         adapter=name, folder=flags.workdir))
        record = _record(flags, results) | {"step": found and found[0], "parameters": found and found[1]} | (
            {"adapter": [name, flags.adapters[name]]} if name else {})
        if jax.process_index() == 0:
            _tell(flags, results, record, found and found[0], name)


def _record(flags: argparse.Namespace, results: JsonObject) -> JsonObject:
    """Return what is kept: the results and all that they depend on; prompts and answers by their hashes."""
    from jaxtrain.observe.versions import git_commit, version_of

    samples = results.get("samples", {})
    hashes = {task: [[one[key] for key in ("doc_hash", "prompt_hash", "target_hash")] for one in each]
              for task, each in samples.items()}
    kept = {key: results[key] for key in ("results", "groups", "configs", "versions", "n-shot", "higher_is_better",
                                          "n-samples") if key in results}
    return {"model": flags.model, **kept, "hashes": hashes, "asked": _asked(flags),
            "packages": {name: version_of(name) for name in ("jaxtrain", "jax", "lm_eval")}, "commit": git_commit(),
            **({"samples": samples} if flags.samples else {})}


def _tell(flags: argparse.Namespace, results: JsonObject, record: JsonObject, step: int | None,
          adapter: str | None = None) -> None:
    """Print the table, and write the record."""
    from lm_eval.utils import make_table

    from jaxtrain.files import atomic_files

    tell((f"{adapter}:\n" if adapter else "") + make_table(results))
    path = _results_path(flags, step, adapter)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write(path, json.dumps(record, indent=1, default=str) + "\n")
    except OSError as error:
        raise UserError("--output", f"{path} cannot be written ({error.strerror})", "name another file") from error
    say(f"{path} has the results")


def _results_path(flags: argparse.Namespace, step: int | None, adapter: str | None = None) -> Any:
    """Return where results go; None: nowhere."""
    path = Path(flags.output) if flags.output else None if step is None else (
        Path(flags.workdir) / FOLDER / f"{step}{'-ema' * flags.ema}.json")
    return path.with_name(f"{path.stem}-{adapter}{path.suffix}") if path and adapter else path


if __name__ == "__main__":
    sys.exit(main())

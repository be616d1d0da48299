"""Evaluate a trained or published model on tasks of lm-evaluation-harness, once or for each new checkpoint."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.base.json_output import tell_json
from jaxtrain.errors import UserError, install_extra, say, tell
from jaxtrain.files.bounded_files import user_json

if TYPE_CHECKING:
    from jaxtrain.observe.trackers.results_log import ResultsLog


FOLDER = "evaluations"  # of a workdir
PAUSE = 10.0  # seconds between looks for a new checkpoint


def check_folder(folder: str) -> None:
    """Refuse a folder without a model, before the harness is imported, which takes long."""
    if Path(folder).is_dir() and not any((Path(folder) / name).is_file() for name in (
            "config.json", "adapter_config.json")):
        raise UserError("WORKDIR", f"{folder} has no config.json", "give the workdir of a run, or a published folder")


@dataclass(frozen=True)
class Settings:
    """The tasks and how they are asked, the model that is asked, and where its results go.

    Each field is a flag of `jaxtrain evaluate`, whose help explains it.
    """

    tasks: str  # names, separated by commas
    workdir: str = ""  # of a run, or a published folder
    model: str = ""  # as it was given
    include: str | None = None
    num_fewshot: int | None = None
    limit: float | None = None
    gen_kwargs: str | None = None
    chat: bool = False
    chat_template: str = ""
    ema: bool = False
    batch_size: int = 64
    seed: int = 0
    adapters: dict[str, str] | None = None
    output: str | None = None
    log_samples: bool = False
    json: bool = False


@dataclass(frozen=True)
class Tasks:
    """Tasks of the harness, and the settings to run them with."""

    names: list[str]
    manager: Any
    settings: Settings

    @classmethod
    def of(cls, settings: Settings) -> "Tasks":
        """Find the tasks; refuse names that are not known."""
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise UserError("--tasks", f"they need the package lm_eval ({error})", install_extra("eval")) from error
        if settings.include and not Path(settings.include).is_dir():
            raise UserError("--include", f"{settings.include} is not a folder",
                            "name the one with the tasks' YAML files")
        manager = TaskManager(include_path=settings.include)
        names = [name for name in settings.tasks.split(",") if name]
        if unknown := [name for name in names if not manager.match_tasks([name])]:
            raise UserError("--tasks", f"there is no task {unknown[0]!r}", "see lm-eval ls tasks, or name the folder "
                            "of your own by --include")
        return cls(names, manager, settings)

    def ask(self, model: Any) -> JsonObject:
        """Return the harness's results for a model."""
        try:
            found = self._results(model, self.settings)
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

    def _results(self, model: Any, settings: Settings) -> JsonObject | None:
        from lm_eval import simple_evaluate

        return simple_evaluate(
            model, tasks=self.names, task_manager=self.manager, num_fewshot=settings.num_fewshot, limit=settings.limit,
            gen_kwargs=settings.gen_kwargs, apply_chat_template=settings.chat, log_samples=True, bootstrap_iters=1000,
            **{f"{of}_seed": settings.seed for of in ("random", "numpy_random", "torch_random", "fewshot_random")})


def watch(settings: Settings, overrides: dict[str, str], tasks: Tasks) -> None:
    """Evaluate every good checkpoint that has no results yet, in order, until the run's last step is among them."""
    from jaxtrain.distributed.coordination import exchange
    from jaxtrain.hub.trained_model import sections_of

    sections = sections_of(settings.workdir)
    last = sections.get("train", {}).get("steps")
    if last is None:
        raise UserError("--watch", f"{settings.workdir} is not the workdir of a run", "leave it out")
    with _results_log(settings, sections, overrides) as log:
        while True:
            step, ended = exchange(None, lambda _: _next(settings, last, log))
            if step is None and ended:
                return
            if step is None:
                time.sleep(PAUSE)
                continue
            try:
                evaluate(settings, overrides, tasks, step)
            except UserError:
                if exchange(None, lambda _, step=step: step in _good(settings)):
                    raise
                say(f"the checkpoint of step {step} was deleted before it was read; give checkpoint.keep more of them")


def _good(settings: Settings) -> dict[int, JsonObject]:
    """Return what `good.json` says of each good checkpoint, by step."""
    from jaxtrain.checkpoint import verify

    folder = Path(settings.workdir) / "checkpoints"
    return {step: record for step in verify.steps(folder) if (record := verify.good(folder, step))}


def _next(settings: Settings, last: int, log: "ResultsLog") -> tuple[int | None, bool]:
    """Return the first good step without results, if any, and whether the last one is there; logs those before it."""
    good = _good(settings)
    for step, record in good.items():
        if _results(settings, step, record) is None:
            return step, False
        log.add(step)
    return None, last in good


@contextlib.contextmanager
def _results_log(settings: Settings, sections: JsonMapping,
                 overrides: dict[str, str]) -> Iterator["ResultsLog"]:
    """Yield the log of the results, which the run's trackers follow as a run of its own."""
    import jax

    from jaxtrain.config.load import make_config
    from jaxtrain.distributed.run_lock import locked
    from jaxtrain.observe import trackers
    from jaxtrain.observe.trackers.results_log import ResultsLog
    from jaxtrain.observe.trackers.tracker import About
    from jaxtrain.redaction import redacted

    workdir, suffix = Path(settings.workdir).absolute(), f"{FOLDER}{'-ema' * settings.ema}"
    run = user_json(workdir / "run.json", {"run?": str}, "WORKDIR", "give the workdir of a run") or {}
    kept = {key: value for key, value in sections.get("observe", {}).items() if key in ("trackers", "project", "name")}
    own = {key: overrides.pop(key) for key in list(overrides) if key.startswith("observe.")}
    options = {name: sections[name] for name in make_config({"observe": kept}, own).plug_ins if name in sections}
    config = make_config({"observe": kept, **options}, own)
    c = config.observe
    trackers.check(c.trackers)
    folder = workdir / FOLDER / ("ema" * settings.ema)
    about = About(f"{run.get('run', workdir.name)}-{suffix}", f"{redacted(c.name) or workdir.name}-{suffix}",
                  redacted(c.project), folder, redacted({**sections, "asked": _asked(settings)}), redacted(run))
    with contextlib.ExitStack() as opened:
        if jax.process_index() == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError("--watch", f"{folder} cannot be written ({error.strerror})", "move it away") from error
            if other := opened.enter_context(locked(folder, 0.0)):
                raise UserError("--watch", f"another process watches {settings.workdir} ({other})",
                                "end that one, or ask it for all tasks")
        yield opened.enter_context(ResultsLog(
            about, lambda: [trackers.made(name, config.plug_ins.get(name)) for name in c.trackers],
            lambda step: _results(settings, step)))


def numbers_of(results: Mapping[str, JsonMapping]) -> dict[str, float]:
    """Return the harness's numbers by one name each: of a metric such as `acc,none` without the filter `none`."""
    found = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            metric, _, kind = key.partition(",")
            if kind and isinstance(value, int | float) and not metric.endswith("_stderr"):
                found["_".join(["eval", task, metric, *([kind] if kind != "none" else [])])] = float(value)
    return found


def _asked(settings: Settings) -> JsonObject:
    """Return what was asked, as results keep it."""
    return {key: getattr(settings, key) for key in ("tasks", "num_fewshot", "limit", "gen_kwargs", "chat", "seed")}


def _results(settings: Settings, step: int, good: JsonMapping | None = None) -> dict[str, float] | None:
    """Return the numbers of a step, if the same tasks were asked in the same way.

    `good`: the content of its checkpoint's `good.json`, of whose parameters they have to be; None: of any.
    """
    from jaxtrain.checkpoint.restore import fingerprint_of

    found = user_json(_results_path(settings, step), {"results?": {str: dict}}, "--watch", "remove it")
    if found is None or found.get("asked") != _asked(settings) or (
            good is not None and found.get("parameters") != fingerprint_of(good)):
        return None
    return numbers_of(found.get("results", {}))


def evaluate(settings: Settings, overrides: dict[str, str], tasks: Tasks, step: int | None) -> None:
    """Ask the model of a checkpoint (None: the newest good one), print the results and write them."""
    import jax

    from jaxtrain.hub import trained_model
    from jaxtrain.hub.chat_messages import chat_of
    from jaxtrain.hub.harness_model import HarnessModel
    from jaxtrain.hub.trained_tokenizer import tokenizer_of

    sections, words = trained_model.sections_of(settings.workdir, text=True), tokenizer_of(settings.workdir)
    chat = chat_of(settings.workdir, sections, words, settings.chat_template) if settings.chat else None
    run, state, found = trained_model.load_with_origin(settings.workdir, overrides, step, settings.ema,
                                                       settings.adapters)
    if not run.config.model.text:
        raise UserError("WORKDIR", f"its model is {run.config.model.name}, which is not a decoder of text",
                        "give one of text")
    adapters = settings.adapters or {}
    for name in adapters or [None]:
        results = tasks.ask(HarnessModel(run, state, words, chat=chat, batch_size=settings.batch_size,
                                         seed=settings.seed, adapter=name, folder=settings.workdir))
        record = _record(settings, results) | {"step": found and found[0], "parameters": found and found[1]} | (
            {"adapter": [name, adapters[name]]} if name else {})
        if jax.process_index() == 0:
            _tell(settings, results, record, found and found[0], name)


def _record(settings: Settings, results: JsonObject) -> JsonObject:
    """Return what is kept: the results and all that they depend on; prompts and answers by their hashes."""
    from jaxtrain.observe.versions import git_commit, version_of

    samples = results.get("samples", {})
    hashes = {task: [[one[key] for key in ("doc_hash", "prompt_hash", "target_hash")] for one in each]
              for task, each in samples.items()}
    kept = {key: results[key] for key in ("results", "groups", "configs", "versions", "n-shot", "higher_is_better",
                                          "n-samples") if key in results}
    return {"model": settings.model, **kept, "hashes": hashes, "asked": _asked(settings),
            "packages": {name: version_of(name) for name in ("jaxtrain", "jax", "lm_eval")}, "commit": git_commit(),
            **({"samples": samples} if settings.log_samples else {})}


def _tell(settings: Settings, results: JsonObject, record: JsonObject, step: int | None,
          adapter: str | None = None) -> None:
    """Print the table, and write the record."""
    from lm_eval.utils import make_table

    from jaxtrain.files import atomic_files

    if settings.json:
        tell_json(record)
    else:
        tell((f"{adapter}:\n" if adapter else "") + make_table(results))
    path = _results_path(settings, step, adapter)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write(path, json.dumps(record, indent=1, default=str) + "\n")
    except OSError as error:
        raise UserError("--output", f"{path} cannot be written ({error.strerror})", "name another file") from error
    say(f"{path} has the results")


def _results_path(settings: Settings, step: int | None, adapter: str | None = None) -> Any:
    """Return where results go; None: nowhere."""
    path = Path(settings.output) if settings.output else None if step is None else (
        Path(settings.workdir) / FOLDER / f"{step}{'-ema' * settings.ema}.json")
    return path.with_name(f"{path.stem}-{adapter}{path.suffix}") if path and adapter else path

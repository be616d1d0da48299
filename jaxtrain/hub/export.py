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

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.errors import UserError, say
from jaxtrain.flags import add_process_flags, command, parser_of

RECORD = "export.json"


@command()
def main(argv: list[str] | None = None) -> None:
    """Parse the flags and export."""
    parser = parser_of("export", __doc__)
    parser.add_argument("workdir", help="workdir of the run")
    parser.add_argument("--output", dest="to", required=True, metavar="FOLDER", help="a new folder for the model")
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
    record = export(flags.workdir, flags.to, flags.step, dtype=flags.dtype, file_bytes=int(flags.file_gb * 1e9),
                    averaged=flags.ema, licence=flags.licence, gates=flags.gates, gate_share=flags.gate_share)
    say(f"{flags.to} has the model of step {record['step']} of {flags.workdir}")
    for suite, counts in record.get("gates", {}).get("suites", {}).items():
        say(f"gates: {suite}: {counts['passed']} of {counts['checks']} passed")
    if not record.get("gates", {}).get("releasable", True):
        say(f"it is not releasable; the answers are in {answers_file(Path(flags.workdir), record['step'], flags.ema)}")
        raise SystemExit(1)


def export(workdir: str | Path, to: str | Path, step: int | None = None, *, dtype: str = "bfloat16",
           file_bytes: int = 4 * 10**9, averaged: bool = False, licence: str = "",
           gates: Sequence[str | Path] = (), gate_share: float = 1.0) -> JsonObject:
    """Write the model of a workdir's checkpoint into the folder `to`, and return what export.json says.

    Every process calls it.

    Args:
        workdir: of the run.
        to: the folder to make.
        step: of the checkpoint; None: the newest good one.
        dtype: of the weights.
        file_bytes: the most that a file of several tensors has.
        averaged: write the moving average of the weights.
        licence: of the model, for its card.
        gates: files of prompts whose answers are checked.
        gate_share: of each suite of gates that has to pass.
    """
    import jax

    from jaxtrain.distributed.coordination import exchange
    from jaxtrain.files import atomic_files
    from jaxtrain.hf.hf_config import config_json
    from jaxtrain.hub import trained_model
    from jaxtrain.hub.release import gates as release_gates
    from jaxtrain.hub.release import model_card
    from jaxtrain.hub.weights import published_weights

    workdir, to = Path(workdir), Path(to)
    check_is_new(to)
    checks, sections = release_gates.read(gates), trained_model.sections_of(workdir)
    run = trained_model.spread_model(sections)
    reward_head = run.config.preference.reward_head
    if checks and reward_head:
        raise UserError("--gates", f"{workdir} has a reward model, which gives no answers", "leave it out")
    described = config_json(run.config.model, reward_head)
    params, found = trained_model.load(workdir, run, step, averaged)
    if found is None:
        raise UserError("WORKDIR", f"{workdir} is a published folder already", "give the workdir of a run")
    partial, first = to.with_name(f"{to.name}.partial"), jax.process_index() == 0
    with nothing_left(partial):
        exchange(None, lambda _: make_folder(partial))  # it is there for all processes
        published_weights.save(params, run.config.model, partial, jax.numpy.dtype(dtype), file_bytes,
                               run.config.lora)
        exchange(None)  # all files are written
        if first:
            _write_configs(workdir, partial, described, run.config, dtype)
        record: dict[str, Any] = {"workdir": workdir.absolute().name, "step": found[0], "parameters": found[1],
                                  "averaged": averaged}
        del params  # the model is loaded again, as it was written
        exchange(None)
        if checks:
            answers = _asked(checks, workdir, partial, found[0], averaged)
            record["gates"] = release_gates.result(answers, gates, gate_share)
        if first:
            atomic_files.write(partial / model_card.FILE, model_card.card(
                workdir, sections, to.name, licence, record,
                any((partial / file).is_file() for file in ("tokenizer.json", "tokenizer.model"))))
            finish(partial, to, record)
        exchange(None)
    return record


def _write_configs(workdir: Path, folder: Path, described: JsonObject, config: Any, dtype: str) -> None:
    """Write config.json, the tokenizer and all else that the published model had which the run began with."""
    from jaxtrain.config.modality_families import WhisperConfig
    from jaxtrain.config.vision_keys import DualEncoderConfig
    from jaxtrain.data.tokenizers.tokenizer import load_tokenizer
    from jaxtrain.files import atomic_files
    from jaxtrain.hf.dual_encoders import PREPROCESSOR, preprocessor
    from jaxtrain.hub.folders import published_files
    from jaxtrain.hub.release import exported_config, exported_tokenizer

    base = published_files.folder_of(workdir)
    exported_tokenizer.write(workdir, folder, base, described, config.model)
    if isinstance(config.model, WhisperConfig):
        from jaxtrain.hub.speech import exported_speech

        kept = workdir / "tokenizer"
        exported_speech.write(workdir, folder, config.model, load_tokenizer(f"{kept}") if kept.is_dir() else None,
                              described)
    if isinstance(config.model, DualEncoderConfig):
        said = published_files.json_of(folder, PREPROCESSOR)
        atomic_files.write_json(folder / PREPROCESSOR, said | preprocessor(config.model))
    exported_config.write(folder, base, described, dtype, config.preference.reward_head)


def _asked(checks: Sequence[Any], workdir: Path, folder: Path, step: int, averaged: bool) -> list[JsonObject]:
    """Return the answers of the model in `folder` to the checks, which are kept beside the run."""
    import jax

    from jaxtrain.hub import trained_model
    from jaxtrain.hub.generate_texts import chat_of
    from jaxtrain.hub.release import gates
    from jaxtrain.hub.trained_tokenizer import tokenizer_of

    words = tokenizer_of(workdir)
    chat = chat_of(workdir, trained_model.sections_of(workdir), words, "") if any(c.chat for c in checks) else None
    run = trained_model.spread_model(trained_model.sections_of(folder))
    answers = gates.ask(checks, run, trained_model.with_params(run, trained_model.load(folder, run)[0]), words, chat)
    if jax.process_index() == 0:
        gates.write_answers(answers_file(workdir, step, averaged), answers)
    return answers


def answers_file(workdir: Path, step: int, averaged: bool) -> Path:
    """Return where the answers to gates are kept."""
    return workdir / "gates" / f"{step}{'-ema' * averaged}.jsonl"


def check_is_new(folder: Path) -> None:
    """Refuse a folder to make that is there."""
    if folder.exists():
        raise UserError("--output", f"{folder} is there already", "name a folder that is not")


def make_folder(folder: Path) -> None:
    """Make a folder anew, which an export that was stopped may have left."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError("--output", f"{folder} cannot be made ({error.strerror})", "name another") from error


@contextlib.contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """A context that makes and fills a folder: if it fails, the folder and the folders made for it are removed."""
    made = [parent for parent in folder.parents if not parent.exists()]
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # something else is in it by now
            for parent in made:
                parent.rmdir()
        raise


def finish(partial: Path, to: Path, record: JsonMapping) -> None:
    """Write export.json, the record and the SHA-256 of every file, and give the folder its name."""
    from jaxtrain.files import atomic_files
    from jaxtrain.files.work_progress import Work

    hashes, files = {}, [file for file in sorted(partial.iterdir()) if file.is_file()]
    with Work("hashing weights", sum(file.stat().st_size for file in files)) as work:
        for file in files:
            hashes[file.name] = atomic_files.file_digest(file)
            work.add(file.stat().st_size)
    atomic_files.write_json(partial / RECORD, {**record, "sha256": hashes})
    os.rename(partial, to)
    atomic_files.sync(to.absolute().parent)


if __name__ == "__main__":
    raise SystemExit(main())

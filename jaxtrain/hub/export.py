"""Write a run's model as a folder in Hugging Face's format, which appears when it is complete."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.errors import UserError

RECORD = "export.json"


def export(workdir: str | Path, to: str | Path, step: int | None = None, *, dtype: str = "bfloat16",
           file_bytes: int = 4 * 10**9, averaged: bool = False, licence: str = "",
           gates: Sequence[str | Path] = (), gate_share: float = 1.0, overwrite: bool = False) -> JsonObject:
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
        overwrite: replace an earlier export in the folder.
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
    check_is_new(to, overwrite)
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
            finish(partial, to, record, overwrite)
        exchange(None)
    return record


def planned(workdir: str | Path, to: str | Path, step: int | None = None, *, dtype: str = "bfloat16",
            gates: Sequence[str | Path] = (), overwrite: bool = False) -> dict[str, Any]:
    """Check what `export` needs and write nothing; return the step, and the parameters and their bytes."""
    import jax

    from jaxtrain.checkpoint import restore
    from jaxtrain.hf.hf_config import config_json
    from jaxtrain.hub import trained_model
    from jaxtrain.hub.release import gates as release_gates
    from jaxtrain.models import lora
    from jaxtrain.run import abstract_model

    check_is_new(Path(to), overwrite)
    release_gates.read(gates)
    run = trained_model.spread_model(trained_model.sections_of(workdir))
    config_json(run.config.model, run.config.preference.reward_head)  # refuses a model without a published format
    if (found := restore.find_good(workdir, step)) is None:
        raise UserError("--step", f"{workdir} has no checkpoint of step {step} that was found good",
                        f"see those that it has: jaxtrain checkpoint list {workdir}")
    count = sum(leaf.size for leaf in jax.tree.leaves(lora.without_adapters(abstract_model(run))))
    return {"workdir": f"{workdir}", "step": found[0], "output": f"{to}", "parameters": count,
            "bytes": count * jax.numpy.dtype(dtype).itemsize}


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
    from jaxtrain.hub.chat_messages import chat_of
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


def check_is_new(folder: Path, overwrite: bool = False) -> None:
    """Refuse a folder to make that is there, unless it may be replaced and is what such a command made."""
    if overwrite and folder.exists() and not (folder / RECORD).is_file():
        raise UserError("--output", f"{folder} has no {RECORD}: it is not an earlier export, and is not replaced",
                        "delete it, or name another folder")
    if folder.exists() and not overwrite:
        raise UserError("--output", f"{folder} is there already", "name a folder that is not")


def make_folder(folder: Path, key: str = "--output") -> None:
    """Make a folder anew, which an export that was stopped may have left. `key`: what names it."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(key, f"{folder} cannot be made ({error.strerror})", "name another") from error


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


def finish(partial: Path, to: Path, record: JsonMapping, overwrite: bool = False) -> None:
    """Write export.json, the record and the SHA-256 of every file, and give the folder its name.

    `overwrite`: a folder that has it is moved away first, and deleted last.
    """
    from jaxtrain.files import atomic_files
    from jaxtrain.files.work_progress import Work

    hashes, files = {}, [file for file in sorted(partial.iterdir()) if file.is_file()]
    with Work("hashing weights", sum(file.stat().st_size for file in files)) as work:
        for file in files:
            hashes[file.name] = atomic_files.file_digest(file)
            work.add(file.stat().st_size)
    atomic_files.write_json(partial / RECORD, {**record, "sha256": hashes})
    replaced = to.with_name(f"{to.name}.replaced")
    if overwrite and to.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(to, replaced)
    os.rename(partial, to)
    shutil.rmtree(replaced, ignore_errors=True)
    atomic_files.sync(to.absolute().parent)

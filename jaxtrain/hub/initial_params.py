"""`train.init_from`: a new run begins with the parameters of another run, or of a published model or its adapters."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.checkpoint import restore
from jaxtrain.checkpoint.trees import flatten
from jaxtrain.config import hub_names
from jaxtrain.config.family import config_of
from jaxtrain.config.load import load_config
from jaxtrain.config.modality_families import WhisperConfig
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.schema import Config, TrainConfig
from jaxtrain.config.vision_keys import DualEncoderConfig, ImageConfig
from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import UserError, say
from jaxtrain.files.atomic_files import file_digest
from jaxtrain.files.bounded_files import user_json
from jaxtrain.files.work_progress import Work
from jaxtrain.hf import hf_config
from jaxtrain.hub import new_tokens
from jaxtrain.hub.adapters import adapter_files
from jaxtrain.hub.export import RECORD
from jaxtrain.hub.folders import published_files
from jaxtrain.hub.trained_tokenizer import tokenizer_of
from jaxtrain.hub.weights import published_weights
from jaxtrain.hub.weights.safetensors_files import INDEX
from jaxtrain.models.heads.scalar_head import without_heads
from jaxtrain.models.lora import is_adapter, without_adapters
from jaxtrain.run import Extension, Run, abstract_model
from jaxtrain.train_step.quantized_kernels import as_floats
from jaxtrain.train_step.state import Params

KEY, ENCODER_KEY = "train.init_from", "train.init_encoder_from"
# The keys of an encoder of images that have to be those of the one that is taken over.
ENCODER = ("patch_size", "image_layers", "image_embed_dim", "image_heads", "image_mlp_dim", "image_norm_eps",
           "image_size", "class_token", "gelu", "pixel_mean", "pixel_std")


@dataclass(frozen=True)
class InitialParams(Extension):
    """A run that begins with the parameters that `train.init_from` and `train.init_encoder_from` name."""

    loads: tuple[Callable[[Run], Any], ...] | None = None  # of a run that is built

    def for_run(self, run: Run, workdir: Path | None) -> "InitialParams":
        """Return it with what loads these parameters; refuse sources that no run can have."""
        return self if self.loads is not None else InitialParams(tuple(_loads(run.config)))

    def initial_params(self, run: Run) -> Params:
        """Load them."""
        if self.loads is None:
            return None
        found = {name: x for load in self.loads for name, x in load(run).items()}
        return _with_principal_components(found, run) if run.config.lora.init == "pissa" else found

    def begins_with(self, run: Run) -> JsonMapping:
        """Return where they are, and what tells them from others."""
        return origins(run.config.train)

    def keep_files(self, run: Run, workdir: Path) -> str:
        """Keep the small files of the model in the workdir; return a warning if its tokenizer is not the data's."""
        if not run.config.train.init_from:
            return ""
        source: Any = run.corpus if run.data is None else run.data
        return keep_files(run, workdir, getattr(source, "tokenizer", None))


def _loads(config: Config) -> list[Callable[[Run], Params]]:
    source, encoder = config.train.init_from, config.train.init_encoder_from
    if config.lora.init == "pissa" and not source:
        raise UserError("lora.init", "pissa begins with the principal components of trained weights, and the run "
                        "begins with random ones", "set train.init_from, or leave it out")
    if encoder and config.model.name != "vision_language":
        raise UserError(ENCODER_KEY, f"it is read with vision_language only, and the model is {config.model.name}",
                        f"give {KEY}")
    return [partial(load, *source_and_step(source, key)) for source, key, load in (
        (source, KEY, _loaded), (encoder, ENCODER_KEY, _encoder)) if source]


def _with_principal_components(params: Params, run: Run) -> Params:
    """Return the parameters with the adapters of `lora.init=pissa`, unless they have some already."""
    if any(map(is_adapter, flatten(params))):
        return params
    from jaxtrain.hub.adapters import principal_components

    return principal_components.with_adapters(params, abstract_model(run), run.config.lora)


def origins(train: TrainConfig) -> JsonObject:
    """Return what run.json says of the parameters that a run begins with. Every process calls it."""
    found = origin(train.init_from) if train.init_from else {}
    return found | ({"encoder": origin(train.init_encoder_from, ENCODER_KEY)} if train.init_encoder_from else {})


def origin(source: str, key: str = KEY) -> JsonObject:
    """Return what run.json says of one source of parameters."""
    folder, step = source_and_step(source, key)
    if (folder / "checkpoints").is_dir():
        found = _checkpoint(folder, step, key)
        theirs = user_json(folder / "run.json", dict, key, "bring it back from where the run was") or {}
        return {"workdir": str(folder.absolute()), "step": found[0], "parameters": found[1]} | (
            {"began_with": theirs["init_from"]} if theirs.get("init_from") else {})
    if step is not None or not _is_published(folder):
        raise _neither(folder, key)
    found = {"folder": str(folder.absolute()), "sha256": exchange(None, lambda _: _hashes(folder, key))}
    return found | ({"base": origin(f"{adapter_files.base_of(folder)}")} if adapter_files.is_adapter_folder(folder)
                    else {})


def _is_published(folder: Path) -> bool:
    return (folder / hf_config.FILE).is_file() or adapter_files.is_adapter_folder(folder)


def _hashes(folder: Path, key: str) -> dict[str, str]:
    """Return the SHA-256 of the config and of the weights; refuse files that are not as they were exported."""
    names = (hf_config.FILE, adapter_files.CONFIG, INDEX)
    paths = [path for path in (*(folder / name for name in names), *sorted(folder.glob("*.safetensors")))
             if path.is_file()]
    with ThreadPoolExecutor(8) as threads, Work("hashing weights", sum(path.stat().st_size for path in paths)) as work:
        def hashed(path: Path) -> str:
            digest = file_digest(path)
            work.add(path.stat().st_size)
            return digest

        found = {path.name: digest for path, digest in zip(paths, threads.map(hashed, paths), strict=True)}
    said = user_json(folder / RECORD, {"sha256?": {str: str}}, key, "export the run again") or {}
    for name, digest in found.items():
        if said.get("sha256", {}).get(name, digest) != digest:
            raise UserError(key, f"{folder / name} is not as it was exported: its SHA-256 is not that in {RECORD}",
                            "copy the folder again")
    return found


def keep_files(run: Run, workdir: Path, tokenizer: Tokenizer | None) -> str:
    """Keep the small files of the model that a run begins with; return a warning if its tokenizer is not the data's.

    `tokenizer`: of the run's data, if it has one.
    """
    folder, _ = source_and_step(run.config.train.init_from)
    published_files.keep(workdir, folder, tokenizer)
    of_texts = run.data is None and run.config.model.text
    return other_tokenizer(folder, tokenizer) if of_texts and tokenizer is not None else ""


def other_tokenizer(folder: Path, ours: Tokenizer) -> str:
    """Return a warning if the data were made with another tokenizer than the model; "" if not, or if none is known."""
    try:
        theirs = tokenizer_of(folder)
    except UserError:  # published folders of models of bytes have none
        return ""
    same = theirs.fingerprint.partition(":")[0] == ours.fingerprint.partition(":")[0]
    return "" if same else (f"warning: the data's tokenizer, {ours.name}, is not that of {folder}: the model knows its "
                            "tokens as other text; prepare the data with the model's (jaxtrain prepare --tokenizer)")


def _loaded(folder: Path, step: int | None, run: Run) -> Params:
    """Return the parameters of either kind of source. A run that resumes does not look for it any more."""
    if (folder / "checkpoints").is_dir():
        return _of_workdir(folder, step, run)
    if step is None and _is_published(folder):
        adapted = adapter_files.is_adapter_folder(folder)
        if adapted and run.config.lora.init == "pissa":
            raise UserError("lora.init", f"the adapters in {folder} have their values already, which pissa would "
                            "replace", f"leave it out, or set {KEY} to the model they are for")
        section = hf_config.model_section(adapter_files.base_of(folder) if adapted else folder)
        theirs = config_of(section)
        _check_multipliers(theirs, run)
        _check_kind(theirs, run)
        what = f"adapters in {folder} and the parameters in {adapter_files.base_of(folder)}" if adapted else (
            f"parameters in {folder}")
        say(f"begins with the published {what}{_otherwise(theirs, run)}")
        if isinstance(theirs, WhisperConfig):
            from jaxtrain.hub.speech.speech_model import prefix_note

            if note := prefix_note(folder, run.config.model):
                say(note)
        if not (adapted or any(folder.glob("*.safetensors")) or (folder / INDEX).exists()):
            raise UserError(KEY, f"{folder} has a {hf_config.FILE} and no weights", "put them there, or set "
                            f"{KEY} to nothing (--config.{KEY}=) to begin with random ones")
        abstract = abstract_model(run) if adapted else without_adapters(abstract_model(run))
        whole = adapter_files.base_of(folder) if adapted else folder
        if "ahead" in abstract and not published_weights.has_further_layers(whole, run.config.model):
            abstract = _without_further_layers(abstract, whole)
        return _with_vocabulary(theirs, run, _own_part(theirs, run, abstract), (
            lambda abstract: adapter_files.load_with_base(folder, run.config.model, run.config.lora, abstract)
            if adapted else published_weights.load(folder, run.config.model, abstract)))
    raise _neither(folder)


def _without_further_layers(abstract: Params, folder: Path | str) -> Params:
    """Return the abstract parameters without multi-token prediction, which begins anew, and say so."""
    say(f"{folder} has no layers for multi-token prediction: those of model.mtp_loss_weight begin with random values; "
        "set train.trainable=[ahead/*] to train them alone, or model.mtp_loss_weight=0 to do without")
    return {name: x for name, x in abstract.items() if name != "ahead"}


def _check_kind(theirs: ModelConfig, run: Run) -> None:
    """Refuse the parameters of encoders where a decoder is asked for, of which the encoder alone may be meant."""
    ours = run.config.model
    if isinstance(theirs, DualEncoderConfig) and ours.name == "vision_language":
        raise UserError(KEY, f"a model of name={theirs.name} has no decoder", f"give its folder as {ENCODER_KEY}")
    if theirs.name != ours.name and ours.name != "vision_language":
        raise UserError(KEY, f"a model of name={theirs.name} is there, and model.name={ours.name}",
                        f"begin with its config (--config=hf:FOLDER, or config.json of its run), or set model.name="
                        f"{theirs.name} and the sizes it has")


def _own_part(theirs: ModelConfig, run: Run, abstract: Params) -> Params:
    """Return the abstract parameters that a model has: a decoder of text has none that see images."""
    if run.config.model.name != "vision_language" or theirs.name == "vision_language":
        return abstract
    return {name: x for name, x in abstract.items() if name not in ("image", "connector")}


def _encoder(folder: Path, step: int | None, run: Run) -> Params:
    """Return the parameters of the encoder of images of another run or of a published model."""
    abstract, model = abstract_model(run)["image"], run.config.model
    ours = (folder / "checkpoints").is_dir()
    if not ours and (step is not None or not _is_published(folder)):
        raise _neither(folder, ENCODER_KEY)
    section = hf_config.model_section(folder) if not ours else None
    theirs = load_config(folder / "config.json").model if section is None else config_of(section)
    assert isinstance(model, ImageConfig)
    if not isinstance(theirs, ImageConfig):
        raise UserError(ENCODER_KEY, f"{folder} has a model of name={theirs.name}, without an image encoder",
                        "name one of siglip, clip or vision_language")
    if other := [key for key in ENCODER if getattr(model, key) != getattr(theirs, key)]:
        raise UserError(ENCODER_KEY, f"the encoder in {folder} has other keys than the model",
                        "set " + ", ".join(f"model.{key}={getattr(theirs, key)}" for key in other))
    say(f"begins with the image encoder of {folder}")
    if section is not None:
        return {"image": published_weights.load_encoder(folder, theirs, abstract)}
    return restore.load_params(folder, {"image": abstract}, _checkpoint(folder, step, ENCODER_KEY)[0])


def _neither(folder: Path, key: str = KEY) -> UserError:
    """Return the error about a source that is neither a run nor a published model, by what it looks like."""
    if folder.suffix.lower() == ".gguf" or any(folder.glob("*.gguf")):
        return hub_names.in_gguf(folder, key)
    if not folder.exists() and hub_names.is_name(f"{folder}"):
        return UserError(key, f"there is no folder {folder}", f"write hf:{folder} for a model on the Hugging Face Hub")
    if not folder.exists():
        return UserError(key, f"there is no folder {folder}", "give the workdir of a run, a published folder, or "
                         "hf:ORG/NAME for a model on the Hugging Face Hub")
    return UserError(key, f"{folder} is neither a run's workdir with checkpoints nor a folder with a published "
                     f"{hf_config.FILE} or {adapter_files.CONFIG}", "give one of these")


def _otherwise(theirs: ModelConfig, run: Run) -> str:
    """Return which keys of the model differ from those of the one it begins with, as the end of a sentence.

    Those that shape parameters are refused when these are loaded; others may differ on purpose, for longer rows say.
    """
    model = run.config.model
    free = {*model.lookups.values(), "name", "vocab_size", "max_seq_len", "router_bias_rate", "mtp_loss_weight",
            "mtp_layers", "balance_loss", "router_z_loss"}
    told = [f"model.{field.name}={getattr(model, field.name)} instead of {getattr(theirs, field.name)}"
            for field in fields(model) if field.name not in free and hasattr(theirs, field.name)
            and getattr(model, field.name) != getattr(theirs, field.name)]
    new = model.vocabulary - theirs.vocabulary
    said = f", but with {', '.join(told)}" if told else ""
    if new > 0:
        said += f"; {new} new tokens begin as the mean of the others"
        if "embed" not in run.abstract.params:
            said += " and stay alike, since embeddings are frozen: name embed/* and output/* in train.trainable"
    return said


def _check_multipliers(theirs: ModelConfig, run: Run) -> None:
    """Refuse parameters that another model would have with them: muP multiplies by other numbers than theirs."""
    if hf_config.multipliers(theirs) != hf_config.multipliers(run.config.model):
        raise UserError("model.mup_base", f"scores, logits or embeddings of {KEY} are multiplied by other numbers",
                        f"set it to {theirs.mup_base}, as there" if theirs.mup_base else "leave it out, as there")


def source_and_step(source: str, key: str = KEY) -> tuple[Path, int | None]:
    """Return the folder and the step that a `train.init_from`, or another key, names; no step: the newest."""
    if source.startswith(hub_names.PREFIX):
        return Path(hub_names.folder(source.removeprefix(hub_names.PREFIX), key)), None
    folder, at, step = source.rpartition("@")
    if not at or Path(source).exists():
        return Path(source), None
    if not step.isdecimal():
        raise UserError(key, f"{step!r} in {source!r} is not a step", "write WORKDIR@STEP, such as runs/base@500")
    return Path(folder), int(step)


def _checkpoint(folder: Path, step: int | None, key: str = KEY) -> tuple[int, str]:
    found = restore.find_good(folder, step)
    if found is None:
        raise UserError(key, f"{folder} has no good checkpoint of step {step}",
                        "see those that it has: jaxtrain checkpoint list")
    return found


def _of_workdir(folder: Path, step: int | None, run: Run) -> Params:
    if not (folder / "config.json").is_file():
        raise UserError(KEY, f"{folder} has checkpoints and no config.json", "bring it back from where the run was")
    before = load_config(folder / "config.json")
    _check_multipliers(before.model, run)
    adapters = before.lora
    if adapters.rank and adapters != run.config.lora:
        raise UserError(KEY, f"{folder} has adapters (lora.rank={adapters.rank}), and this run has others or none",
                        "set the same lora keys, or run jaxtrain export, which merges the adapters, and use its folder")
    if before.preference.reward_head and not run.config.preference.reward_head:
        raise UserError(KEY, f"{folder} has a reward model, and this run trains a language model",
                        "begin with a language model, or set preference.loss=reward")
    abstract = abstract_model(run) if adapters.rank else without_adapters(as_floats(abstract_model(run)))
    _check_kind(before.model, run)
    abstract = _own_part(before.model, run, without_heads(abstract, but=(before.scalar_head,)))
    if "ahead" in abstract and not before.model.multi_token_loss:
        abstract = _without_further_layers(abstract, folder)
    found = _checkpoint(folder, step)
    say(f"begins with the parameters of step {found[0]} of {folder}{_otherwise(before.model, run)}")
    return _with_vocabulary(before.model, run, abstract,
                            lambda abstract: restore.load_params(folder, abstract, found[0]))


def _with_vocabulary(theirs: ModelConfig, run: Run, abstract: Params, load: Callable[[Params], Params]) -> Params:
    """Return the parameters that `load` gives for abstract ones, with those of tokens that their model lacks."""
    model = run.config.model
    for key, ours, known in (("vocab_size", model.vocabulary, theirs.vocabulary), *(
            (key, getattr(model, key), getattr(theirs, key, 0)) for key in model.lookups.values())):
        if ours < known:
            raise UserError(f"model.{key}", f"{ours} is less than the {known} of the model in {KEY}",
                            f"set it to {known} or more")
    if (known := new_tokens.tokens(theirs)) == new_tokens.tokens(model):
        return load(abstract)
    return new_tokens.with_new_tokens(load(new_tokens.with_known_tokens(abstract, known)), abstract, known)

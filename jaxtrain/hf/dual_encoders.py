"""SigLIP and CLIP as they are published: their config.json and preprocessor_config.json, to our keys and back.

A key that a file leaves out has the default that Hugging Face's transformers gives it.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxtrain.base.annotations import Json
from jaxtrain.config.field_checks import most
from jaxtrain.config.vision_keys import CHANNELS, DualEncoderConfig
from jaxtrain.errors import UserError
from jaxtrain.files import bounded_files
from jaxtrain.hf import defaults
from jaxtrain.hf.hf_format import Keys

PREPROCESSOR = "preprocessor_config.json"
# Keys that say how rows are made, and what preprocessor_config.json and the tokenizer say.
UNPUBLISHED = ("images_per_row", "patches_per_side", "max_seq_len", "pixel_mean", "pixel_std", "text_end", "text_pad")
# Published key -> ours, of the encoder of texts and of that of images.
_TEXT = {"vocab_size": "vocab_size", "hidden_size": "embed_dim", "intermediate_size": "mlp_dim",
         "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "max_position_embeddings": "text_len",
         "layer_norm_eps": "norm_eps"}
_IMAGE = {"hidden_size": "image_embed_dim", "intermediate_size": "image_mlp_dim",
          "num_hidden_layers": "image_layers", "num_attention_heads": "image_heads", "image_size": "image_size",
          "patch_size": "patch_size", "layer_norm_eps": "image_norm_eps"}
_LIMITS = most(DualEncoderConfig)
_GELUS = {"gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu": "exact", "quick_gelu": "quick"}
_IMAGES = 8  # in a row
_BICUBIC = 3  # Pillow's number for it
# What each model's processor does with an image where its file does not say otherwise.
_PROCESSORS: dict[str, Keys] = {
    "siglip": {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_center_crop": None},
    "clip": {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
             "do_center_crop": True}}


def section(kind: str, given: Keys, path: Path) -> Keys:
    """Return the keys of a config's `model` section that a config.json amounts to."""
    def refuse(key: str, value: object, why: str) -> UserError:
        return UserError(f"{path}", f"{key}={defaults.shown(value)} {why}",
                         "use a model that jaxtrain can express")

    whole = defaults.filled(defaults.table()[kind], given, path)
    if given.get("quantization_config"):
        raise refuse("quantization_config", given["quantization_config"], "cannot be expressed: only plain weights can")
    text, image = (defaults.filled(
        defaults.table()[f"{kind}_{half}_model"], _half(kind, given, f"{half}_config", refuse), path, f"{half}_config.")
        for half in ("text", "vision"))
    found = {}
    for half, known, table in (("text_config", text, _TEXT), ("vision_config", image, _IMAGE)):
        found |= _sizes(half, known, table, refuse)
        if known["hidden_act"] not in _GELUS or known["hidden_act"] != text["hidden_act"]:
            raise refuse(f"{half}.hidden_act", known["hidden_act"], "cannot be expressed: only a GELU that both "
                         "encoders share can")
    for key, only in (("num_channels", CHANNELS), ("vision_use_head", True)):
        if image.get(key, only) != only:
            raise refuse(f"vision_config.{key}", image[key], f"cannot be expressed: only {only!r} can")
    clip = kind == "clip"
    found |= {"name": kind, "gelu": _GELUS[text["hidden_act"]], "class_token": clip,
              "pooling": "class" if clip else "probe", "projections": "unbiased" if clip else "text"}
    wide = image["hidden_size"]
    if clip:
        found["joint_dim"] = whole["projection_dim"]
        if found["joint_dim"] is None or not 0 < found["joint_dim"] <= _LIMITS["joint_dim"]:
            raise refuse("projection_dim", found["joint_dim"], "is not a size that a model has")
    else:
        found["joint_dim"] = text["hidden_size"] if text["projection_size"] is None else text["projection_size"]
        if found["joint_dim"] != wide:
            raise refuse("text_config.projection_size", found["joint_dim"], f"is not the width {wide} of images")
    side = image["image_size"] // image["patch_size"]
    return found | _tokens(kind, text, refuse) | {"patches_per_side": side, "images_per_row": _IMAGES,
                                                  "max_seq_len": _IMAGES * (side**2 + clip)}


def _sizes(half: str, known: Keys, table: Mapping[str, str], refuse: Callable[[str, Json, str], UserError]) -> Keys:
    """Return the keys of one encoder that have another name only, once they are sizes that one can have."""
    for key, ours in table.items():
        value, kind = known[key], "float" if key.endswith("eps") else "int"
        if defaults.misfit(value, [kind]) or not value > 0:
            raise refuse(f"{half}.{key}", value, "is not a size that a model has")
        if value > _LIMITS.get(ours, value):
            raise refuse(f"{half}.{key}", value, f"is more than {_LIMITS[ours]:,}, the most that jaxtrain reads")
    return {ours: known[key] for key, ours in table.items()}


def _tokens(kind: str, text: Keys, refuse: Callable[[str, Json, str], UserError]) -> Keys:
    """Return the keys of the tokens that texts begin and end with and are filled up with."""
    vocabulary, end = text["vocab_size"], text["eos_token_id"]
    if kind == "siglip":
        tokens = {"text_end": text["pad_token_id"], "text_pad": text["pad_token_id"]}
    else:
        # An end of 2 is the word of old files for the last token of the vocabulary, before which is that of beginnings.
        tokens = {"text_begin": vocabulary - 2, "text_end": vocabulary - 1} if end == 2 else {
            "text_begin": text["bos_token_id"], "text_end": end}
    for key, token in tokens.items():
        if type(token) is not int or not 0 <= token < vocabulary:
            raise refuse(f"text_config, {key[5:]} token", token, f"is not a token below vocab_size={vocabulary}")
    return tokens


def _half(kind: str, given: Keys, name: str, refuse: Callable[[str, Json, str], UserError]) -> Keys:
    """Return what a file says of one encoder; `NAME_dict` of older CLIP files counts where it is there."""
    older = given.get(f"{name}_dict") if kind == "clip" else None
    if older is not None and not isinstance(older, dict):
        raise refuse(f"{name}_dict", older, "is not an object")
    return (given.get(name) or {}) if older is None else older


def beside(kind: str, given: Keys, folder: Path, section: Keys) -> Keys:
    """Return the keys that other files of a folder say: what is done to pixels, and the tokens that fill up texts."""
    return pixels(kind, folder, section["image_size"]) | fillers(kind, folder)


def pixels(kind: str, folder: Path, image_size: int) -> Keys:
    """Return the keys of what is subtracted from pixels and what they are divided by, as the processor's file says.

    Raises:
        UserError: it prepares images otherwise than the model reads them.
    """
    path, fix = folder / PREPROCESSOR, "bring the file that belongs to the model, or leave it out"
    given = bounded_files.user_json(path, dict, "--config", fix)
    if given is None:  # transformers 5 writes the processors of images and of texts into one file
        path = folder / "processor_config.json"
        given = (bounded_files.user_json(path, dict, "--config", fix) or {}).get("image_processor") or {}
    known: Keys = {"do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255} | _PROCESSORS[kind] | given
    for key in ("do_rescale", "do_normalize"):
        if known[key] is not True:
            raise UserError(f"{path}", f"{key}={known[key]!r} cannot be expressed: only True can", fix)
    if abs(known["rescale_factor"] * 255 - 1) > 1e-6:
        raise UserError(f"{path}", f"rescale_factor={known['rescale_factor']} cannot be expressed: only 1/255 can", fix)
    size = known.get("crop_size" if known["do_center_crop"] else "size")
    for side in size.values() if isinstance(size, Mapping) else [size] * (size is not None):
        if side != image_size:
            raise UserError(f"{path}", f"it makes images of {side} pixels, and the model reads those of "
                            f"{image_size}", fix)
    if known.get("resample", _BICUBIC) not in (_BICUBIC, "bicubic"):
        warnings.warn(f"{path}: resample={known['resample']!r}, and prepare_sequences images resizes bicubically "
                      f"({_BICUBIC}): pixels differ a little from those that the model was trained on, where images "
                      "are not of its size already", stacklevel=2)
    found = {"pixel_mean": known["image_mean"], "pixel_std": known["image_std"]}
    for key, value in found.items():
        if not isinstance(value, list) or any(not isinstance(x, int | float) for x in value):
            raise UserError(f"{path}", f"{key.replace('pixel', 'image')}={value!r} is not a number for each channel",
                            fix)
    return {key: [float(x) for x in value] for key, value in found.items()}


def fillers(kind: str, folder: Path) -> Keys:
    """Return the keys of the tokens that a SigLIP's texts end with and are filled up with, where a file names them.

    Its config.json knows only one, and not that of tokenizers which have two.
    """
    if kind != "siglip":
        return {}
    said = bounded_files.user_json(folder / "tokenizer_config.json", dict, "--config", "download it again") or {}
    ids = {token["content"]: int(number) for number, token in (said.get("added_tokens_decoder") or {}).items()}
    return {key: ids[name] for key, name in (("text_end", said.get("eos_token")), ("text_pad", said.get("pad_token")))
            if isinstance(name, str) and name in ids}


def named_fillers(c: DualEncoderConfig, tokenizer: Keys) -> Keys:
    """Return what tokenizer_config.json says of the tokens that texts end with and are filled up with.

    `tokenizer`: the content of tokenizer.json.
    """
    known = {token["id"]: token for token in tokenizer.get("added_tokens") or []}
    ids = {"eos_token": c.text_end, "pad_token": c.text_end if c.text_pad < 0 else c.text_pad}
    found = {name: known[number] for name, number in ids.items() if number in known}
    return {name: token["content"] for name, token in found.items()} | {"added_tokens_decoder": {
        f"{token['id']}": {key: x for key, x in token.items() if key != "id"} for token in found.values()}}


def described(c: DualEncoderConfig) -> Keys:
    """Return what config.json says of a model."""
    if not c.image_size:
        raise UserError("model.image_size", f"without it positions are those of rows and columns, which published "
                        f"{c.name} models do not have", "keep it in jaxtrain's format, or train one with the keys of "
                        "docs/vision.md")
    halves: list[Keys] = [{"model_type": f"{c.name}_{half}_model", "hidden_act": next(
        theirs for theirs, ours in _GELUS.items() if ours == c.gelu)} | {
            key: getattr(c, ours) for key, ours in table.items()}
        for half, table in (("text", _TEXT), ("vision", _IMAGE))]
    halves[0] |= {"projection_dim": c.joint_dim, "bos_token_id": c.text_begin, "eos_token_id": c.text_end} if (
        c.name == "clip") else {"projection_size": c.joint_dim, "pad_token_id": c.text_pad}
    halves[1] |= {"projection_dim": c.joint_dim} if c.name == "clip" else {}
    return {"architectures": [{"siglip": "SiglipModel", "clip": "CLIPModel"}[c.name]], "model_type": c.name,
            "text_config": halves[0], "vision_config": halves[1]} | (
                {"projection_dim": c.joint_dim} if c.name == "clip" else {})


def preprocessor(c: DualEncoderConfig) -> Keys:
    """Return what preprocessor_config.json says of the images that a model reads."""
    square, clip = {"height": c.image_size, "width": c.image_size}, c.name == "clip"
    return {"image_processor_type": "CLIPImageProcessor" if clip else "SiglipImageProcessor", "do_convert_rgb": True,
            "do_resize": True, "resample": _BICUBIC, "size": {"shortest_edge": c.image_size} if clip else square,
            "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": list(c.pixel_mean),
            "image_std": list(c.pixel_std)} | ({"do_center_crop": True, "crop_size": square} if clip else {})

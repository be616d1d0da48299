"""Write tests/hub/towers/towers_truth.json: what transformers computes with a tiny SigLIP and tiny CLIPs.

    python -m tests.hub.towers.towers_truth            # writes the file
    python -m tests.hub.towers.towers_truth --exports  # loads what jaxtrain exports, and compares both embeddings
    python -m tests.hub.towers.towers_truth --pixels   # compares images of --square with the published processors'

It needs torch and transformers, and the last one Pillow; the tests need neither. It computes in float64.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.hub import published
from tests.hub.towers import tiny_towers as tiny

TO = Path(__file__).with_suffix(".json")


def values(kind: str, pixels: np.ndarray) -> torch.Tensor:
    """An image as the processor gives it to the model."""
    mean, std = tiny.mean_and_std(kind)
    return torch.from_numpy(((pixels / 255 - mean) / std).transpose(2, 0, 1)[None])


def inputs(name: str) -> dict[str, torch.Tensor]:
    """The square images, which may have pixels beyond the last whole patch, and the texts."""
    kind = name.partition("_")[0]
    size = tiny.CONFIGS[name]["vision_config"]["image_size"]
    pixels = torch.cat([values(kind, image) for image in tiny.IMAGES["square"]])
    more = size - pixels.shape[-1]
    return {"pixel_values": torch.nn.functional.pad(pixels, (0, more, 0, more), value=9.0),
            "input_ids": torch.tensor([tiny.tokens(kind, ids) for ids in tiny.TEXTS])}


def model_of(name: str) -> Any:
    config = transformers.AutoConfig.for_model(name.partition("_")[0], **tiny.CONFIGS[name])
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").double().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.copy_(torch.from_numpy(np.asarray(published.weight(key, tuple(weight.shape)))))
    return model


def rounded(tensor: torch.Tensor) -> list[float]:
    return [float(f"{x:.9g}") for x in tensor.detach().numpy().reshape(-1)]


def computed(name: str) -> dict[str, Any]:
    """Embeddings, the loss and all gradients; and embeddings of images of other shapes."""
    model, kind = model_of(name), name.partition("_")[0]
    out = model(**inputs(name), return_loss=True)
    out.loss.backward()
    found = {"config": model.config.to_dict(), "shapes": {key: list(p.shape) for key, p in model.named_parameters()},
             "images": rounded(out.image_embeds), "texts": rounded(out.text_embeds), "loss": out.loss.item(),
             "gradients": {key: [float(f"{x:.8g}") for x in published.projections(key, p.grad.numpy())]
                           for key, p in model.named_parameters()}}
    others = [model.get_image_features(values(kind, image), interpolate_pos_encoding=True).pooler_output
              for image in tiny.IMAGES["others"]]
    others = torch.nn.functional.normalize(torch.cat(others), dim=-1)
    return found | {"others": rounded(others)}


def exported(name: str) -> float:
    """The largest error of the embeddings of what jaxtrain exports."""
    import jaxtrain as jt
    from jaxtrain.hf.hf_config import config_json, starting_config
    from jaxtrain.hub.weights import published_weights

    truth = json.loads(TO.read_text())[name]
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        folder = published.write(Path(first) / "in", {"config": truth["config"], "tensors": truth["shapes"]})
        run = jt.build(jt.make_config(starting_config(f"{folder}"), {"data.global_batch_size": 1, "mesh.data": 1}))
        published_weights.save(published_weights.load(folder, run.config.model, run.abstract.params),
                               run.config.model, Path(second), np.float32, 10**9)
        (Path(second) / "config.json").write_text(json.dumps(config_json(run.config.model)))
        model, told = transformers.AutoModel.from_pretrained(second, dtype=torch.float64, output_loading_info=True)
        assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
        out = model(**inputs(name))
    return max(float(np.abs(np.subtract(rounded(found), truth[which])).max()) for which, found in (
        ("images", out.image_embeds), ("texts", out.text_embeds)))


def compared() -> None:
    """Print how far 8-bit pixels are from those of the processors, which PIL resizes, and from torch's own resizing."""
    import io

    from PIL import Image
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    from jaxtrain.config.family import config_class
    from jaxtrain.data.prepare_sequences.image_patches import Images
    from jaxtrain.hf.dual_encoders import preprocessor, section

    rng = np.random.default_rng(0)
    for kind, made in (("siglip", SiglipImageProcessorPil), ("clip", CLIPImageProcessorPil)):
        model = config_class(kind)(**section(kind, {}, Path("config.json")))
        said = {key: value for key, value in preprocessor(model).items() if key != "image_processor_type"}
        (mean, std), differences, others = tiny.mean_and_std(kind), [], []
        processor = made(**said | {"image_mean": mean, "image_std": std})
        source = Images(patch_size=model.patch_size, square=224, crop_square=kind == "clip")
        for height, width in ((480, 640), (333, 250), (100, 150), (224, 224), (1000, 301)):
            coarse = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3)).astype(np.uint8))
            image = coarse.resize((width, height), Image.Resampling.BILINEAR)
            image.save(content := io.BytesIO(), "png")
            ours = source._pixels(content.getvalue()).astype(float)
            theirs = processor(image, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
            differences.append(np.abs((theirs * std + mean) * 255 - ours).max())
            if kind == "siglip":
                pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None]
                torchs = torch.nn.functional.interpolate(pixels, (224, 224), mode="bicubic", antialias=True)
                others.append(np.abs(torchs[0].permute(1, 2, 0).numpy().astype(float) - ours).max())
        print(f"{kind}: pixels differ by at most {max(differences):.1e} of 255 from those of its processor on Pillow"
              + (f", and by {max(others):.0f} from torch's resizing of 8-bit images" if others else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exports", action="store_true")
    parser.add_argument("--pixels", action="store_true")
    flags = parser.parse_args()
    if flags.pixels:
        return compared()
    if flags.exports:
        for name in tiny.CONFIGS:
            print(f"{name}: embeddings of the export differ by {exported(name):.1e}")
        return
    found = {name: computed(name) for name in tiny.CONFIGS}
    TO.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

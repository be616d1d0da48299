"""The training batches that a config describes, of whatever kind its model reads."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.schema import DataConfig
from jaxtrain.config.sections.diloco_keys import DilocoConfig
from jaxtrain.data.loading.batch_spec import Array


def configured_corpus(model: ModelConfig, data: DataConfig) -> Any:
    """Return the tokenized text, or the sequences that a model of another kind reads."""
    if not model.text:
        from jaxtrain.data.loading.modalities.sequence_batches import load_sequences

        return load_sequences(data)
    from jaxtrain.data.corpus.text_cache import load_corpus

    return load_corpus(data)


def configured_batches(model: ModelConfig, data: DataConfig, diloco: DilocoConfig, corpus: Any,
                       arrays: Mapping[str, Array], split: str = "train") -> Any:
    """Return the batches of a split by step; `arrays`: those that the model reads. None: the split is empty."""
    train = split == "train"
    if model.rows_of == "images":
        from jaxtrain.config.vision_keys import PatchesConfig
        from jaxtrain.data.loading.modalities.image_batches import image_batches

        assert isinstance(model, PatchesConfig)
        return image_batches(model, data, corpus, split)
    if not model.text:
        from jaxtrain.data.loading.modalities.sequence_batches import sequence_batches
        from jaxtrain.data.loading.modalities.spec_augment import augmented

        found = sequence_batches(data, corpus, split, arrays)
        return augmented(found, model, data.seed) if train else found
    from jaxtrain.data.loading.batches import eval_batches, train_batches

    if not train:
        return eval_batches(data, corpus)
    if diloco.count:
        from jaxtrain.data.loading.island_part import island_batches

        return island_batches(data, corpus, diloco.index, diloco.count)
    return train_batches(data, corpus)

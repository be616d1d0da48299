"""The training batches that a config describes, of whatever kind its model reads."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.data.loading.batch_spec import Array


def configured_corpus(config: Config) -> Any:
    """Return the tokenized text, or the sequences that a model of another kind reads."""
    if not config.model.text:
        from jaxtrain.data.loading.modalities.sequence_batches import load_sequences

        return load_sequences(config.data)
    from jaxtrain.data.corpus.text_cache import load_corpus

    return load_corpus(config.data)


def configured_batches(config: Config, corpus: Any, arrays: Mapping[str, Array], split: str = "train") -> Any:
    """Return the batches of a split by step; `arrays`: those that the model reads. None: the split is empty."""
    data, train = config.data, split == "train"
    if config.model.rows_of == "pictures":
        from jaxtrain.data.loading.modalities.picture_batches import picture_batches

        return picture_batches(config, corpus, split)
    if not config.model.text:
        from jaxtrain.data.loading.modalities.sequence_batches import sequence_batches
        from jaxtrain.data.loading.modalities.spec_augment import augmented

        found = sequence_batches(data, corpus, split, arrays)
        return augmented(found, config.model, data.seed) if train else found
    from jaxtrain.data.loading.batches import eval_batches, train_batches

    if not train:
        return eval_batches(data, corpus)
    if (islands := config.islands).count:
        from jaxtrain.data.loading.island_part import island_batches

        return island_batches(data, corpus, islands.index, islands.count)
    return train_batches(data, corpus)

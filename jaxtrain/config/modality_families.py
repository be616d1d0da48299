"""The families that are not decoders of text: a dataclass for each with just the fields that it reads."""

import dataclasses
from dataclasses import dataclass

from jaxtrain.config.field_checks import derive, not_negative, positive
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.errors import UserError, nearest

TABLE_ROWS = 64  # divides the rows of tables of categories, so that most meshes split them evenly
SILENCE = -1.5  # the least value of a log-mel frame, as of samples that are all 0


@dataclass(frozen=True)
class EventsConfig(ModelConfig):
    """Events of users, or of anything else in time: a causal transformer that predicts the next one."""

    name: str = "events"
    # Columns of ids, and how many ids each has (with 0, which is for what is missing): {"item": 5000, "shop": 40}
    categories: dict[str, int] = dataclasses.field(default_factory=dict, hash=False)
    numbers: list[str] = dataclasses.field(default_factory=list, hash=False)  # columns of numbers
    predict: str = ""  # the column of ids to predict; "": the first of model.categories
    time_loss: float = 0.0  # weight of the squared error of log(1 + time to the next event); 0: times are not predicted
    # pyrefly: ignore[bad-override]
    window: int = 0  # sliding attention window in events; 0: none
    # pyrefly: ignore[bad-override]
    tied_embeddings: bool = True  # whether the output projection is the table of the predicted column
    rope_theta: float = 10_000.0  # base of the rotary positions

    def __post_init__(self):
        super().__post_init__()
        positive(self, "model", "rope_theta")
        not_negative(self, "model", "window time_loss")
        for name, ids in self.categories.items():
            if type(ids) is not int or not 0 < ids < 2**31:
                raise UserError(f"model.categories.{name}", f"{ids!r} is not a number of ids", "give 1 or more")
        if not self.categories:
            raise UserError("model.categories", "events without any cannot be predicted", "name the columns that "
                            "prepare_sequences events --category made, as {'item': 5000}")
        derive(self, "predict", next(iter(self.categories)))
        if self.predict not in self.categories:
            raise UserError("model.predict", f"{self.predict!r} is not among model.categories",
                            nearest(self.predict, self.categories))

    @property
    def vocab_size(self) -> int:  # pyrefly: ignore[bad-override]
        """The number of ids that the predicted column's table has room for."""
        return self.rows(self.predict)

    def rows(self, category: str) -> int:
        """Return the rows of a category's table: as many as it has ids, rounded up."""
        return -(-self.categories[category] // TABLE_ROWS) * TABLE_ROWS


@dataclass(frozen=True)
class ClipsConfig(ModelConfig):
    """Labelled audio clips: an encoder of their frames that predicts the label of a clip."""

    name: str = "clips"
    labels: int = 0  # number of labels: the folders of prepare_sequences audio --target=folder
    rope_theta: float = 10_000.0  # base of the rotary positions
    causal = False
    rows_cut = True  # pyrefly: ignore[bad-override]

    def __post_init__(self):
        super().__post_init__()
        positive(self, "model", "labels rope_theta")


@dataclass(frozen=True)
class WhisperConfig(ModelConfig):
    """Whisper: an encoder of log-mel frames, and a decoder of tokens that attends to the encoder."""

    name: str = "whisper"
    # pyrefly: ignore[bad-override]
    vocab_size: int = 51_865  # rows of the embedding table: at least the tokenizer's vocabulary
    max_seq_len: int = 448  # longest sequence in tokens, with model.prefix and model.end; each has a learned position
    encoder_layers: int = 0  # blocks of the encoder; 0: num_layers, which are those of the decoder
    audio_positions: int = 1500  # positions of the encoder, for two frames each: 1500 are 30 seconds
    mask_padding: bool = True  # mask padding of audio in attention; False: it is silence to the model, as published
    mels: int = 80  # mel bands: 80, or 128 in large-v3
    audio_chunk: int = 0  # streaming: positions per chunk; each attends to its own and earlier chunks; 0: all
    audio_chunks_back: int = 0  # with audio_chunk: number of earlier chunks to attend to; 0: all
    # Tokens in front of every transcript: its start and, where they are the same for all, language, task and timestamps
    prefix: list[int] = dataclasses.field(default_factory=lambda: [50258], hash=False)
    end: int = 50257  # the token after a transcript
    ctc_weight: float = 0.0  # weight of the encoder's CTC loss; cross-entropy has 1 - ctc_weight; 0: no CTC head
    # SpecAugment (arXiv 1904.08779), which sets frames and bands of training rows to 0:
    time_masks: int = 0  # number of masked stretches of frames
    time_mask: int = 100  # with time_masks: maximum length of a masked interval, in frames
    mel_masks: int = 0  # number of masked ranges of bands
    mel_mask: int = 27  # with mel_masks: maximum width of a masked range, in bands

    tied_embeddings = True
    causal = False
    rows_cut = True  # pyrefly: ignore[bad-override]
    flops_known = False
    fixed = ("audio_positions",)

    def __post_init__(self):
        super().__post_init__()
        positive(self, "model", "vocab_size audio_positions mels time_mask mel_mask")
        not_negative(self, "model", "encoder_layers audio_chunk audio_chunks_back ctc_weight time_masks mel_masks end")
        derive(self, "encoder_layers", self.num_layers)
        if self.mup_base:
            raise UserError("model.mup_base", "whisper does not support muP", "leave it out")
        if self.num_kv_heads != self.num_heads:
            raise UserError("model.num_kv_heads", f"{self.num_kv_heads} differs from model.num_heads={self.num_heads}",
                            "leave it 0: whisper has as many")
        if self.embed_dim % 2 or self.embed_dim < 4:
            raise UserError("model.embed_dim", f"{self.embed_dim} is not a width for sines and cosines",
                            "give an even one from 4")
        if self.audio_chunks_back and not self.audio_chunk:
            raise UserError("model.audio_chunks_back", "it is read with model.audio_chunk only", "set that, too")
        if self.ctc_weight > 1:
            raise UserError("model.ctc_weight", f"{self.ctc_weight} is a share above 1", "give one such as 0.3")
        if not self.prefix or len(self.prefix) >= self.max_seq_len:
            raise UserError("model.prefix", f"{len(self.prefix)} tokens in rows of {self.max_seq_len}",
                            "give the tokens that a transcript begins with, at least one")
        for key, tokens in (("prefix", self.prefix), ("end", [self.end])):
            if wrong := [token for token in tokens if type(token) is not int or not 0 <= token < self.vocab_size]:
                raise UserError(f"model.{key}", f"{wrong[0]!r} is not a token below model.vocab_size={self.vocab_size}",
                                "give ids of the tokenizer")

    @property
    def longest_row(self) -> int:
        """The most frames of a row."""
        return 2 * self.audio_positions

    @property
    def transcript(self) -> int:
        """The most tokens of a transcript between `prefix` and `end`."""
        return self.max_seq_len - len(self.prefix)

    @property
    def staged_layers(self) -> int:
        """The number of layers that pipeline stages share: those of the encoder, then those of the decoder."""
        return self.encoder_layers + self.num_layers

    def other_rows(self, seq_len: int) -> list[tuple[str, int, str, bool]]:
        """Return the positions of the encoder and the tokens of the decoder."""
        return [("data.seq_len", -(-seq_len // 2), "positions of the encoder", False),
                ("model.max_seq_len", self.max_seq_len, "tokens of the decoder", True)]

    def attentions(self, seq_len: int) -> list[tuple[int, int, int, bool]]:
        """Return that of the encoder, that of the decoder to its tokens, and that of the decoder to the encoder."""
        audio, tokens, dim = -(-seq_len // 2), self.max_seq_len, self.head_dim
        # By chunks, which are a mask in memory, the encoder takes no kernel.
        encoder = [] if self.audio_chunk else [(audio, audio * self.mask_padding, dim, False)]
        return [*encoder, (tokens, 0, dim, True), (tokens, audio, dim, False)]

"""The families that are not decoders of text: a dataclass for each with just the fields that it reads."""

import dataclasses
from dataclasses import dataclass

from jaxtrain.config.field_checks import at_most, derive, number
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.errors import UserError, nearest

TABLE_ROWS = 64  # divides the rows of tables of categories, so that most meshes split them evenly
SILENCE = -1.5  # the least value of a log-mel frame, as of samples that are all 0


@dataclass(frozen=True)
class EventsConfig(ModelConfig):
    """A causal transformer that predicts the next event, such as what a user does next."""

    name: str = "events"
    # columns of ids, with the number of ids of each (including 0, which stands for a missing value): {"item": 5000,
    # "shop": 40}
    categories: dict[str, int] = dataclasses.field(default_factory=dict, hash=False)
    numbers: list[str] = dataclasses.field(default_factory=list, hash=False)  # columns of numbers
    predict: str = ""  # the column of ids to predict; "": the first one in model.categories
    # weight of the loss for the time to the next event, the squared error of log(1 + time); 0: the time is not
    # predicted
    time_loss: float = number(0.0, least=0)
    window: int = number(0, least=0)  # sliding attention window in events; 0: full attention
    # whether the output projection shares the weights of the predicted column's embedding table
    tied_embeddings: bool = True
    rope_theta: float = number(10_000.0, above=0)  # base frequency of the rotary position embedding (RoPE)

    def __post_init__(self):
        super().__post_init__()
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
    def vocabulary(self) -> int:
        """The number of ids that the predicted column's table has room for."""
        return self.rows(self.predict)

    @property
    def ties_head(self) -> bool:
        """Whether the output projection is the predicted column's table."""
        return self.tied_embeddings

    @property
    def windows(self) -> dict[int, int]:
        """The number of layers for each attention window; 0: none."""
        return {self.window: self.num_layers}

    def rows(self, category: str) -> int:
        """Return the rows of a category's table: as many as it has ids, rounded up."""
        return -(-self.categories[category] // TABLE_ROWS) * TABLE_ROWS


@dataclass(frozen=True)
class ClipsConfig(ModelConfig):
    """A classifier of audio clips: a transformer encoder of their frames."""

    name: str = "clips"
    # number of labels (classes): the folders that prepare_sequences audio --target=folder found
    labels: int = at_most(0, 2**24, above=0)
    rope_theta: float = number(10_000.0, above=0)  # base frequency of the rotary position embedding (RoPE)
    causal = False
    rows_cut = True


@dataclass(frozen=True)
class WhisperConfig(ModelConfig):
    """Whisper: an encoder of log-mel frames, and a decoder of tokens with cross-attention."""

    name: str = "whisper"
    # size of the embedding table: at least the size of the tokenizer's vocabulary
    vocab_size: int = at_most(51_865, 2**24, above=0)
    # the longest decoder sequence in tokens, including model.prefix and model.end; one position embedding is learned
    # for each
    max_seq_len: int = 448
    # number of encoder blocks; 0: num_layers, which is the number of decoder blocks
    encoder_layers: int = at_most(0, 10_000, least=0)
    # number of encoder positions, each of two frames: 1500 positions are 30 seconds
    audio_positions: int = at_most(1500, 2**22, above=0)
    # mask the padding of audio in attention; False: padding is treated as silence, as in the published models
    mask_padding: bool = True
    mels: int = at_most(80, 2**12, above=0)  # number of mel bands in a frame: 80, or 128 in large-v3
    # streaming: chunk size in encoder positions; each position attends to its own chunk and earlier ones; 0: to all
    # audio
    audio_chunk: int = number(0, least=0)
    # with audio_chunk, the number of earlier chunks that a position attends to; 0: all of them
    audio_chunks_back: int = number(0, least=0)
    # tokens at the start of every transcript: the start token and, where they are the same for all, language, task and
    # timestamps
    prefix: list[int] = dataclasses.field(default_factory=lambda: [50258], hash=False)
    end: int = number(50257, least=0)  # the token that ends a transcript
    # weight of a CTC loss on the encoder's output; the cross-entropy has weight 1 - ctc_weight; 0: no CTC head
    ctc_weight: float = number(0.0, least=0, most=1.0, fix="give a share such as 0.3")
    # SpecAugment (arXiv 1904.08779) in training: number of time masks, which set ranges of frames to 0
    time_masks: int = at_most(0, 2**10, least=0)
    time_mask: int = number(100, above=0)  # SpecAugment: the most frames in one time mask
    # SpecAugment: number of frequency masks, which set ranges of mel bands to 0
    mel_masks: int = at_most(0, 2**10, least=0)
    mel_mask: int = number(27, above=0)  # SpecAugment: the most mel bands in one frequency mask

    ties_head = True
    causal = False
    rows_cut = True
    flops_known = False
    fixed = ("audio_positions",)

    def __post_init__(self):
        super().__post_init__()
        derive(self, "encoder_layers", self.num_layers)
        if self.mup_base:
            raise UserError("model.mup_base", "whisper does not support muP", "leave it out")
        if self.num_kv_heads != self.num_heads:
            raise UserError("model.num_kv_heads", f"{self.num_kv_heads} differs from model.num_heads={self.num_heads}",
                            "set it to 0: whisper has as many key and value heads as query heads")
        if self.embed_dim % 2 or self.embed_dim < 4:
            raise UserError("model.embed_dim", f"{self.embed_dim} is not a width for sines and cosines",
                            "give an even one from 4")
        if self.audio_chunks_back and not self.audio_chunk:
            raise UserError("model.audio_chunks_back", "it is read with model.audio_chunk only", "set that, too")
        if not self.prefix or len(self.prefix) >= self.max_seq_len:
            raise UserError("model.prefix",
                            f"{len(self.prefix)} tokens in sequences of model.max_seq_len={self.max_seq_len}",
                            "give the tokens that a transcript begins with, at least one")
        for key, tokens in (("prefix", self.prefix), ("end", [self.end])):
            if wrong := [token for token in tokens if type(token) is not int or not 0 <= token < self.vocab_size]:
                raise UserError(f"model.{key}", f"{wrong[0]!r} is not a token below model.vocab_size={self.vocab_size}",
                                "give ids of the tokenizer")

    @property
    def vocabulary(self) -> int:
        """The number of rows of the embedding table."""
        return self.vocab_size

    @property
    def rough_size(self) -> int:
        """A number of parameters of the order of those of encoder and decoder."""
        return super().rough_size + self.encoder_layers * self.embed_dim * (self.embed_dim + self.mlp_dim)

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

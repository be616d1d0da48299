"""The families that are no decoders of text: a dataclass for each with just the fields that it reads."""

import dataclasses
from dataclasses import dataclass

from jaxtrain.config.field_checks import derive, not_negative, positive
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.errors import UserError, nearest

TABLE_ROWS = 64  # divides the rows of tables of categories, so that most meshes split them evenly


@dataclass(frozen=True)
class EventsConfig(ModelConfig):
    """Events of users, or of anything else in time: a causal transformer that predicts the next one."""

    name: str = "events"
    # Columns of ids, and how many ids each has (with 0, which is for what is missing): {"item": 5000, "shop": 40}
    categories: dict[str, int] = dataclasses.field(default_factory=dict, hash=False)
    numbers: list[str] = dataclasses.field(default_factory=list, hash=False)  # columns of numbers
    predict: str = ""  # the column of ids that is predicted; "": the first of model.categories
    time_loss: float = 0.0  # weight of the squared error of log(1 + time to the next event); 0: it is not predicted
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
        """How many ids the predicted column's table has room for."""
        return self.rows(self.predict)

    def rows(self, category: str) -> int:
        """Return the rows of a category's table: as many as it has ids, rounded up."""
        return -(-self.categories[category] // TABLE_ROWS) * TABLE_ROWS


@dataclass(frozen=True)
class ClipsConfig(ModelConfig):
    """Audio clips with labels: an encoder of their frames that says which label a clip has."""

    name: str = "clips"
    labels: int = 0  # how many there are: the folders of prepare_sequences audio --target=folder
    rope_theta: float = 10_000.0  # base of the rotary positions
    causal = False

    def __post_init__(self):
        super().__post_init__()
        positive(self, "model", "labels rope_theta")

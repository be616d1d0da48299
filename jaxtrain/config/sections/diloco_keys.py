"""The section of a config that makes a run one of several islands, which train apart and exchange updates."""

from dataclasses import dataclass, fields
from typing import Any

from jaxtrain.config.field_checks import at_most, bounded, choice, number
from jaxtrain.errors import UserError

MODES = ("sync", "async", "gossip")
OWN = ("index", "meeting", "keys", "max_age", "snapshot_every")  # keys that need not be equal on all islands
LOSSY = ("int8", "int4", "top_k", "random_k", "power_sgd")  # what is lost is remembered, and sent with what comes next


@dataclass(frozen=True)
class DilocoConfig:
    """Training in islands (DiLoCo) (docs/diloco.md); off by default. All islands need equal keys except index."""

    # number of islands; each trains on batches of data.global_batch_size, so together they train on count times as
    # many; 0: off
    count: int = at_most(0, 2**16, least=0)
    index: int = number(0, least=0)  # number of the island that this run is, from 0
    # where islands exchange updates: tcp://HOST:PORT of `jaxtrain diloco serve`, a store (a path or URL), or both as
    # tcp://HOST:PORT,STORE: the store is used while the port cannot be reached
    meeting: str = ""
    keys: str = ""  # with tcp://: folder with the certificates of this island, made by `jaxtrain diloco keys`
    # outer updates: "sync": one for all islands together; "async": one for each island; "gossip": between pairs of
    # islands
    mode: str = choice("sync", *MODES)
    every: int = number(50, above=0)  # inner steps between two exchanges of the same parameters
    # learning rate of the outer optimizer; 1 with momentum=0 averages parameters (local SGD)
    learning_rate: float = number(0.7, above=0)
    # Nesterov momentum of the outer optimizer
    momentum: float = number(0.9, least=0, below=1, fix="try 0.9")
    # gossip: strength of the pull towards the mean of two islands, below 2 - 2 * momentum ** 2; 0: half of that limit
    pull: float = number(0.0, least=0)
    # number of parts in which parameters are exchanged, one after the other (streaming DiLoCo)
    fragments: int = at_most(1, 10_000, above=0)
    overlap: int = number(0, least=0)  # inner steps that are trained while an exchange is under way
    # with overlap: share of the island's own parameters that is kept when the update arrives
    blend: float = number(0.5, least=0, below=1, fix="try 0.5")
    # format in which updates are sent: bfloat16; int8, int4, top_k, random_k or power_sgd with error feedback; none:
    # float32
    compression: str = choice("none", "none", "bfloat16", *LOSSY)
    rank: int = at_most(4, 2**16, above=0)  # power_sgd: rank of the two factors of each matrix
    # after missing this many outer updates, an island drops the progress that it could not contribute
    max_age: int = at_most(16, 2**20, least=0)
    # async: an update that is a rounds older than at equal speed has weight (1 + a) ** -age_decay
    age_decay: float = number(0.5, least=0)
    # outer updates between snapshots of the outer state, from which new islands join
    snapshot_every: int = number(20, above=0)

    def __post_init__(self):
        bounded(self, "diloco")
        for key in () if self.count else (spec.name for spec in fields(self)):
            if getattr(self, key) != getattr(DilocoConfig, key):
                raise UserError(f"diloco.{key}", "it is read with diloco.count only", "set that, or leave it out")
        if self.count and self.index >= self.count:
            raise UserError("diloco.index", f"there are {self.count} islands, counted from 0",
                            f"use {self.count - 1} or less, or raise diloco.count")
        if bool(self.keys) != (tcp := "tcp://" in self.meeting):
            raise UserError("diloco.keys", f"{self.meeting} {'needs' if tcp else 'takes no'} certificates",
                            "give the folder of this island's" if tcp else "leave it out, or meet at tcp://HOST:PORT")
        if self.every % self.fragments:
            raise UserError("diloco.every", f"{self.every} steps do not divide into {self.fragments} fragments",
                            f"use a multiple of {self.fragments}")
        if self.overlap >= self.interval:
            raise UserError("diloco.overlap", f"an exchange begins every {self.interval} steps, and would meet the "
                            "next one", f"use {self.interval - 1} or less")
        if self.blend != DilocoConfig.blend and not self.overlap:
            raise UserError("diloco.blend", "it is read with diloco.overlap only", "set that, or leave it out")
        if self.mode != "sync" and self.fragments > 1:
            raise UserError("diloco.fragments", f"an update of diloco.mode={self.mode} has all parameters", "use 1")
        if self.compression != "power_sgd" and self.rank != DilocoConfig.rank:
            raise UserError("diloco.rank", f"diloco.compression={self.compression} does not read it",
                            "leave it out, or use power_sgd")
        for key, mode in (("age_decay", "async"), ("pull", "gossip")):
            if self.mode != mode and getattr(self, key) != getattr(DilocoConfig, key):
                raise UserError(f"diloco.{key}", f"only diloco.mode={mode} reads it", "set that, or leave it out")
        if self.pull >= (limit := 2 - 2 * self.momentum**2):
            raise UserError("diloco.pull", f"with diloco.momentum={self.momentum:g}, islands drift apart from "
                            f"{limit:.4g} on", f"use less, such as {limit / 2:.4g}, or leave it out")

    @property
    def interval(self) -> int:
        """Inner steps from one exchange to the next."""
        return self.every // self.fragments

    @property
    def shared(self) -> tuple[str, ...]:
        """The outer optimizer's state for a parameter besides its value; except with gossip, equal on all islands."""
        return () if not self.momentum else ("momentum", "arrived") if self.mode == "async" else ("momentum",)

    @property
    def kept(self) -> tuple[str, ...]:
        """All that is kept for every parameter: what was lost in sending its progress, too."""
        return (*self.shared, "unsent") if self.compression in LOSSY else self.shared


def check(config: Any) -> None:
    """Refuse a `Config` whose other sections do not work with islands."""
    for key, value, reason in (
            ("rl.prompts", config.rl.prompts, "prompts are not divided among islands, so that all would "
             "answer the same ones"),
            ("resilience.spikes", config.resilience.spikes == "rollback", "what an island has offered stays in the "
             "log, and cannot be gone back from"),
            ("train.patience", config.train.patience, "each island has evaluations of its own, and those that go on "
             "would wait for one that ended early")):
        if config.diloco.count and value:
            raise UserError(key, reason, "set it to skip" if key == "resilience.spikes" else
                            "leave it out, or diloco.count")

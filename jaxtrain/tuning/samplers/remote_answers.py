"""`rl.sampler`: the weights of a run go to a server, and its answers come back."""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import UserError
from jaxtrain.hub.generate import Generated
from jaxtrain.tuning.samplers.asked_in_turn import AnyWeights
from jaxtrain.tuning.samplers.awaited import Awaited
from jaxtrain.tuning.samplers.completions import Answering, Terms
from jaxtrain.tuning.samplers.remote_sampler import RemoteSampler
from jaxtrain.tuning.samplers.sent_weights import SentWeights, Weights, sends_adapters
from jaxtrain.tuning.samplers.vllm_routes import VllmServer

if TYPE_CHECKING:
    from jaxtrain.config.schema import Config
    from jaxtrain.run import Run
    from jaxtrain.train_step.state import TrainState

FOLDER = "sampler"  # of a workdir


@dataclass
class RemoteAnswers:
    """A server and the weights for it. Every process has it, and the first one talks to the server."""

    sampler: RemoteSampler
    sent: SentWeights
    _fields: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, run: "Run", tokenizer: Tokenizer, ends: Sequence[int], workdir: Path | None) -> "RemoteAnswers":
        """Return the sampler of a run. `ends`: tokens that end answers, beside the end of a document."""
        c, folder = run.config.rl, run.config.rl.sampler_folder
        if not folder:
            folder = workdir / FOLDER if workdir is not None else exchange(
                None, lambda _: tempfile.mkdtemp(prefix="jaxtrain-sampler-"))
        limit = 2**20 + 512 * run.config.data.seq_len  # bytes of a response: some for each token
        server = VllmServer.of(c.sampler, _timeout_of(run.config), limit)
        terms = Terms(c.max_new_tokens, c.temperature, tuple(dict.fromkeys([*ends, tokenizer.eod])),
                      run.config.model.vocabulary, tokenizer)
        found = cls(RemoteSampler(server, terms, c.sampler_timeout_s, sends_adapters(run.config), workdir),
                    SentWeights(run, Path(folder)))
        if workdir is None and not c.sampler_folder:
            weakref.finalize(found, shutil.rmtree, folder, True)
        return found

    def written(self, step: int, state: "TrainState") -> Weights:
        """Return the weights after this step, in a folder that the server sees."""
        known, found = self.sent.is_known(step), self.sent.written(step, state)
        if not known:
            self._fields |= {"sync_s": self.sent.written_s, "sync_bytes": self.sent.written_bytes}
        return found

    def kept(self, step: int) -> Weights | None:
        """Return the weights after this step that an earlier start of the run left."""
        return self.sent.kept(step)

    def ask(self, many: int, asking: Callable[[Answering], list[Generated]], weights: AnyWeights,
            record: Callable[[list[Generated]], None]) -> Awaited:
        """Have answers made by these weights; weights before them are dropped when the answers are on record."""
        import jax

        if jax.process_index():
            return Awaited(many, None)
        written = self.sent.kept(weights.step)
        assert written is not None

        def recorded(answers: list[Generated]) -> None:
            record(answers)
            self.sent.drop_before(weights.step)

        return self.sampler.ask(many, asking, written, recorded)

    def before_save(self) -> None:
        """Do nothing: the weights of outstanding answers are in files."""

    def stop(self) -> None:
        """Cancel outstanding requests; return at once."""
        self.sampler.stop()

    def forget(self) -> None:
        """Forget what was asked for and written."""
        self.sampler.forget()
        self.sent.forget()

    def pop_fields(self) -> dict[str, float]:
        """Return what was measured since the last call."""
        found, self._fields = self._fields, {}
        return found | self.sampler.pop_fields()


def _timeout_of(config: "Config") -> float:
    """Return the time limit; answers must come before the run counts as hung."""
    limit, longest = config.rl.sampler_timeout_s, config.resilience.hang_floor
    if config.resilience.hang_factor and limit > longest:
        raise UserError("rl.sampler_timeout_s", f"{limit:g} s are longer than resilience.hang_floor={longest:g} s, "
                        "after which a run counts as hung",
                        f"set resilience.hang_floor={2 * limit:.0f}, or allow less time")
    return limit

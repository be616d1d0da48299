"""The samplers of a training service: the adapters of the newest ones are in memory."""

import threading
from collections import OrderedDict

from jaxtrain.serving.api_parts import lora_of
from jaxtrain.serving.lora_engine import Engine, Shape
from jaxtrain.serving.sampling_calls import Sampler
from jaxtrain.serving.saved_adapters import SavedAdapters
from jaxtrain.serving.work_queue import Refused
from jaxtrain.train_step.state import Params


class Samplers:
    """Samplers by name, the newest last."""

    def __init__(self, engine: Engine, most: int):
        self.engine, self.most = engine, most
        self._samplers: OrderedDict[str, Sampler] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, id: str, sampler: Sampler) -> None:
        """Add a sampler; the oldest ones lose their adapters, and those that were not saved are gone."""
        with self._lock:
            self._samplers[id] = sampler
            self._samplers.move_to_end(id)
            held = [name for name, one in self._samplers.items() if one.params is not None and not one.is_base]
            for name in held[:max(len(held) - self.most, 0)]:
                if self._samplers[name].place is None:
                    del self._samplers[name]
                else:  # it can be loaded again
                    self._samplers[name].shape = self._samplers[name].params = None
            while len(self._samplers) > 32 * self.most:
                self._samplers.popitem(last=False)

    def weights(self, id: str, sampler: Sampler, saved: SavedAdapters) -> tuple[Shape, Params]:
        """Return the programs and the adapters of a sampler, which are loaded if they are not there."""
        if sampler.is_base:
            return self.engine.plain.shape, self.engine.plain.params
        if sampler.shape is None:
            assert sampler.place is not None
            shape = self.engine.shape(lora_of(saved.about(sampler.place)))
            sampler.params = saved.load(sampler.place, {"params": shape.run.abstract.params})["params"]
            sampler.shape = shape
            self.keep(id, sampler)
        return sampler.shape, sampler.params

    def of(self, owner: str, id: object) -> Sampler:
        """Return an owner's sampler; refuse a name that none has."""
        found = self._samplers.get(id) if isinstance(id, str) else None
        if found is None or found.owner != owner:
            raise Refused(404, f"there is no sampler {id!r}: it has made room for newer ones (--samplers="
                          f"{self.most}), or the server was started anew; make a new one")
        return found

    def of_session(self, session: str) -> list[str]:
        """Return the names of a session's samplers."""
        return [name for name, one in self._samplers.items() if one.session == session]

    def finish(self, session: str) -> None:
        """Forget the samplers of a session."""
        with self._lock:
            for name in self.of_session(session):
                del self._samplers[name]

"""Do something at each training batch of a run: wait, fail, or look at what is placed."""

from collections.abc import Callable
from typing import Any

from jaxtrain.data.loading.grain_datasets.prefetch import prefetch


def at_each_batch(do: Callable[[int, Callable[[], Any]], Any], replace: Callable[..., None] = setattr) -> None:
    """Have `do(step, place)` called, on the thread that places batches; it returns what `place()` returned.

    Args:
        replace: `monkeypatch.setattr`, where the process goes on afterwards.
    """
    before = prefetch.__init__

    def changed(self, batches, start, stop, place, *rest, **more):
        before(self, batches, start, stop, lambda step, local: do(step, lambda: place(step, local)), *rest, **more)

    replace(prefetch, "__init__", changed)

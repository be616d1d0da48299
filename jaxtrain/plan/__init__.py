"""Which mesh, and will it fit: answered from the traced step and data sheets, and checked by the real compiler."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtrain.config.schema import Config
    from jaxtrain.plan.search import Found


def plan(config: "Config", target: str, *, targets: str | Path | None = None,
         precisions: Sequence[str] = ()) -> "Found":
    """Layouts of a config on a target such as "h100x256", fastest first; print the result for a table.

    `targets`: a JSON file with accelerators of one's own, or with what was measured of them. `precisions`: others than
    the config's to be ranked as well.
    """
    from jaxtrain.plan import search
    from jaxtrain.plan import targets as known

    return search.search(config, *known.parse(target, targets), precisions=precisions)

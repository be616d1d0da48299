"""Pipeline schedules as static tables of what each stage does at each tick; built, checked and analysed without JAX.

A model is cut into stages x chunks pieces; a micro-batch passes them in the order of their *position*. Operations: F
forward, B backward (the gradient of the input, and of the weights unless the schedule has W), W gradient of the
weights. The orders are those of the papers:

    gpipe         all forwards, then all backwards                          arXiv 1811.06965
    1f1b          one forward, one backward; few activations held           PipeDream-flush in arXiv 2104.04473
    interleaved   1f1b over several chunks per stage, a smaller bubble      arXiv 2104.04473, section 2.2
    zb_h1         1f1b with W filling the bubble, in the memory of 1f1b     arXiv 2401.10241
    zb_v          two chunks per stage placed in a V, no bubble inside      arXiv 2401.10241, 2405.15362

`paired` schedules do up to one F and one B per stage and tick. Where all stages advance in lockstep a tick lasts as
long as its longest operation: F on one stage during B on another wastes time, F and B on both does not.

    jaxtrain schedules --schedule=zb_h1 --stages=4 --microbatches=8     draws one
    jaxtrain schedules --all                                            compares them
"""

from jaxtrain.parallel.schedules.making import NAMES, forward_only, make, wrong_chunks
from jaxtrain.parallel.schedules.schedule import Hop, Op, Position, Schedule, peak_activations, straight, v_shape
from jaxtrain.parallel.schedules.schedule_checks import validate
from jaxtrain.parallel.schedules.slots import Column, Table, table
from jaxtrain.parallel.schedules.table_files import from_file, to_csv, to_json
from jaxtrain.parallel.schedules.times import efficiency, free_running_time, ideal_time, modelled_time

__all__ = [
    "NAMES", "Column", "Hop", "Op", "Position", "Schedule", "Table", "efficiency", "forward_only", "free_running_time",
    "from_file", "ideal_time", "make", "modelled_time", "peak_activations", "straight", "table", "to_csv", "to_json",
    "v_shape", "validate", "wrong_chunks",
]

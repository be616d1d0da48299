"""What a run tells: metrics.jsonl, the progress line, TensorBoard, and the files that say which run it was."""

from jaxtrain.observe.flops import PEAK_BF16, device_peak, flops_per_token, mfu
from jaxtrain.observe.metrics import Constants, MetricsWriter, Sink
from jaxtrain.observe.progress import Progress
from jaxtrain.observe.runinfo import check_workdir, write_run_files
from jaxtrain.observe.tensorboard import TensorBoard, summary_writer

__all__ = ["PEAK_BF16", "Constants", "MetricsWriter", "Progress", "Sink", "TensorBoard", "check_workdir", "device_peak",
           "flops_per_token", "mfu", "summary_writer", "write_run_files"]

"""Rates of failures from published reports, by what a failure takes with it.

The counts are the reports'; which kind of failure a cause counts as is an assumption of ours, given beside each.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# The Llama 3 Herd of Models (arXiv:2407.21783), table 5: 419 unexpected interruptions in 54 days on 16,384 H100 in
# 2,048 machines, beside 47 planned ones.
LLAMA3_CAUSES = {
    "machine": {"faulty GPU": 148, "GPU HBM3 memory": 72, "unplanned host maintenance": 32, "GPU SRAM memory": 19,
                "GPU system processor": 17, "silent data corruption": 6, "GPU thermal interface and sensor": 6,
                "SSD": 3, "power supply": 3, "server chassis": 2, "IO expansion board": 2, "CPU": 2,
                "system memory": 2},
    "hang": {"network switch or cable": 35, "NIC": 7, "NCCL watchdog timeouts": 7},
    "process": {"software bug": 54, "dependency": 2},
}
LLAMA3_MACHINES, LLAMA3_DAYS, LLAMA3_PLANNED = 2048, 54, 47
# Robust LLM Training Infrastructure at ByteDance (arXiv:2509.16293), table 4: the incidents of the dense job, which had
# three months on 9,600 GPUs in 1,200 machines.
BYTEROBUST_INCIDENTS = {"machine": 128, "hang": 15, "process": 12, "stop": 20}
BYTEROBUST_MACHINES, BYTEROBUST_DAYS = 1200, 91


@dataclass(frozen=True)
class Rates:
    """Failures per machine and day by kind, and where the figures are from."""

    per_day: Mapping[str, float]
    source: str

    @property
    def thousand_node_days(self) -> float:
        """Failures in a thousand days of one machine, of all kinds that nobody asked for."""
        return 1000 * sum(rate for kind, rate in self.per_day.items() if kind != "stop")

    def scaled(self, thousand_node_days: float, source: str) -> "Rates":
        """Return rates of the same mixture of kinds with another sum."""
        factor = thousand_node_days / self.thousand_node_days
        return Rates({kind: factor * rate for kind, rate in self.per_day.items() if kind != "stop"}, source)


def _counted(counts: Mapping[str, float], machines: int, days: float, source: str) -> Rates:
    return Rates({kind: count / machines / days for kind, count in counts.items()}, source)


LLAMA3 = _counted({kind: sum(causes.values()) for kind, causes in LLAMA3_CAUSES.items()}, LLAMA3_MACHINES, LLAMA3_DAYS,
                  "Llama 3 405B (arXiv:2407.21783): 419 in 54 days on 2,048 machines of 8 H100")
RATES = {
    "llama3": LLAMA3,
    "byterobust": _counted(BYTEROBUST_INCIDENTS, BYTEROBUST_MACHINES, BYTEROBUST_DAYS,
                           "ByteRobust's dense job (arXiv:2509.16293): 155 in 91 days on 1,200 machines of 8 GPUs"),
    # Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters (arXiv:2410.21680).
    "rsc1": LLAMA3.scaled(6.50, "RSC-1 (arXiv:2410.21680): 6.50 per thousand node-days; kinds as in Llama 3's report"),
    "rsc2": LLAMA3.scaled(2.34, "RSC-2 (arXiv:2410.21680): 2.34 per thousand node-days; kinds as in Llama 3's report"),
}

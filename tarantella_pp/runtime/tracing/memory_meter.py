"""How much memory a rank has really taken: resident memory, or that of its GPU."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from tarantella_pp.partition.plan.plan_parts import MeasuredPeak

STATUS = Path("/proc/self/status")
_GPU = "GPU:0"


class MemoryMeter:
    """Measures the most memory that this process has taken at a time, from now on.

    Of a GPU it is what TensorFlow's allocator says. Otherwise it is the resident memory of the
    process, with all that is in it: the graphs and the compiled code of TensorFlow, data that were
    loaded since, buffers of MPI. Systems keep its highest level (Linux' `VmHWM`), which cannot be
    begun anew without changing what others read of it; as long as it has not risen, what is known
    is that it was not more.

    Attributes:
        on_gpu: Whether it is the memory of a GPU.
    """

    def __init__(self, held: int = 0, status: Path = STATUS) -> None:
        self.on_gpu = bool(tf.config.get_visible_devices("GPU"))
        self._status = status
        self._held = held
        self._begin = self._now_and_peak()

    def peak(self) -> MeasuredPeak | None:
        """The most by now; `None` where the system does not say."""
        begin, found = self._begin, self._now_and_peak()
        if begin is None or found is None:
            return None
        (now, before), (_, peak) = begin, found
        size = max(0, peak - now + self._held)
        return MeasuredPeak(size, exact=peak > before, on_gpu=self.on_gpu)

    def _now_and_peak(self) -> tuple[int, int] | None:
        """Bytes that are taken now, and that were at the most."""
        if self.on_gpu:
            info = tf.config.experimental.get_memory_info(_GPU)
            return info["current"], info["peak"]
        try:
            lines = self._status.read_text().splitlines()
        except OSError:  # another system
            return None
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        if not {"VmRSS", "VmHWM"} <= set(fields):
            return None
        now, peak = (1024 * int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM"))
        return now, peak

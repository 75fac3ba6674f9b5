"""Whether a model fits into this machine's memory, before anything is allocated. No torch.

What loading takes is estimated from the shapes: weights as they will lie in memory, the KV pool as
if it were full, the largest matrix while it is being converted, and the libraries.
"""

from pathlib import Path

from msgspec import Struct

from backends.engine.errors import StartFailed
from backends.engine.native.packing import Dtype
from backends.engine.shape import ModelShape
from backends.engine.weights import Weights

_LIBRARIES = 300_000_000  # Python with torch, as measured
_CONVERTING = 3  # fp32 copies of the largest matrix at the same time
_KEPT_BYTES = {"Q4_0": 20 / 32, "Q4_1": 20 / 32, "Q4_K": 20 / 32, "Q8_0": 34 / 32}
_DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "int8": 34 / 32, "int4": 20 / 32}


class Need(Struct, frozen=True, kw_only=True):
    """Bytes."""

    weights: int
    pool: int
    loading: int

    @property
    def total(self) -> int:
        return self.weights + self.pool + self.loading


def need(
    weights: Weights, shape: ModelShape, *, dtype: Dtype, is_torch: bool, pool_bytes: int
) -> Need:
    """What loading takes at most. `is_torch`: without the compiled kernels, everything is fp32."""
    body = shape.body_params * _bytes_each(weights.kind("blk.0.ffn_gate.weight"), dtype, is_torch)
    name = "output.weight" if weights.kind("output.weight") else "token_embd.weight"
    head = shape.head_params * _bytes_each(weights.kind(name), dtype, is_torch)
    largest = 4 * max(shape.head_params, 2 * shape.feed_forward * shape.hidden)
    return Need(
        weights=round(body + head), pool=pool_bytes, loading=_CONVERTING * largest + _LIBRARIES
    )


def check(found: Need, available: int | None, *, name: str) -> None:
    """Raises StartFailed that says what would fit. None: it is not known, so it is tried."""
    if available is None or found.total <= available:
        return
    without_pool = found.weights + found.loading
    left = available - without_pool
    if left > 0:
        advice = f"kv_memory_gb = {int(left / 1e7) / 100:.2f} would fit"
    else:
        advice = 'the weights alone do not fit: weights = "int4" or a smaller model might'
    raise StartFailed(
        f"{name} needs about {_gb(found.total)} GB of memory (weights {_gb(found.weights)}, KV "
        f"pool {_gb(found.pool)}, loading {_gb(found.loading)}), {_gb(available)} GB are free: "
        f"{advice}"
    )


def available_bytes(
    *, meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """What this process may still take: free memory, or what its control group leaves, if less."""
    found: list[int] = []
    try:
        lines = meminfo.read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            cached = 0
            for line in (group / "memory.stat").read_text().splitlines():
                if line.startswith("inactive_file "):
                    cached = int(line.split()[1])
            used = int((group / "memory.current").read_text())
            found.append(max(0, int(limit) - used + cached))
    except (OSError, ValueError, IndexError):
        pass  # another system, or no control group: what was found until here counts
    return min(found, default=None)


def _bytes_each(kind: str | None, dtype: Dtype, is_torch: bool) -> float:
    if is_torch:
        return 4.0
    if dtype == "auto":
        return _KEPT_BYTES.get(kind or "", 2.0)
    return _DTYPE_BYTES[dtype]


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f}"

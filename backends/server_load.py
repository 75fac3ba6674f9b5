"""How busy an inference server says it is, read from its own metrics page.

Pure: text in, numbers out. What each server calls its numbers is written down here and nowhere
else. Invariant: what a server does not say is None, never 0.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

import msgspec
from msgspec import Struct

_SAMPLE: Final = re.compile(
    r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^}\n]*\})? ([0-9.eE+-]+)(?: [0-9]+)?$", re.MULTILINE
)
MAX_TEXT: Final = 2 * 1024 * 1024


class Load(Struct, frozen=True):
    """Requests that it computes and that wait there; the share of its KV cache that is taken."""

    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None

    @property
    def requests(self) -> int:
        return (self.running or 0) + (self.waiting or 0)


@runtime_checkable
class Loaded(Protocol):
    """A backend that can say how busy its server is."""

    async def load(self, path: str, /) -> Load | None:
        """What the page at this path says; None: nothing, or it does not answer in time."""
        ...


class _Names(Struct, frozen=True):
    """The names of one kind of server, the newest first."""

    running: Sequence[str]
    waiting: Sequence[str]
    kv_used: Sequence[str]


SERVERS: Final[Mapping[str, _Names]] = {
    "vllm": _Names(
        ("vllm:num_requests_running",),
        ("vllm:num_requests_waiting",),
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),  # shares, despite the name
    ),
    "sglang": _Names(
        ("sglang:num_running_reqs",), ("sglang:num_queue_reqs",), ("sglang:token_usage",)
    ),
    "tgi": _Names(("tgi_batch_current_size",), ("tgi_queue_size",), ()),
    "llama.cpp": _Names(
        ("llamacpp:requests_processing",),
        ("llamacpp:requests_deferred",),
        ("llamacpp:kv_cache_usage_ratio",),
    ),
    "meterline": _Names(
        ("meterline_engine_running_requests",),
        ("meterline_engine_waiting_requests",),
        ("meterline_engine_kv_cache_usage_ratio",),
    ),
}


def load_of(text: bytes) -> Load | None:
    """The load in a metrics page (Prometheus text) or in SGLang's `/get_load` (JSON). Numbers of
    several models, ranks or processes add up; the fullest cache counts. None: no server we know."""
    if text.lstrip()[:1] in (b"[", b"{"):
        return _of_json(text)
    found: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(text[:MAX_TEXT].decode("utf-8", "replace")):
        try:
            found.setdefault(name, []).append(float(value))
        except ValueError:
            continue
    for names in SERVERS.values():
        running, waiting = _of(found, names.running), _of(found, names.waiting)
        if running is None and waiting is None:
            continue
        kv_used = _of(found, names.kv_used)
        return Load(
            None if running is None else round(sum(running)),
            None if waiting is None else round(sum(waiting)),
            None if kv_used is None else min(max(0.0, *kv_used), 1.0),
        )
    return None


def _of(found: Mapping[str, list[float]], names: Sequence[str]) -> list[float] | None:
    """The finite samples under the first of these names that has any."""
    for name in names:
        values = [value for value in found.get(name, ()) if 0 <= value < 1e12]
        if values:
            return values
    return None


class _Rank(Struct, frozen=True):
    num_reqs: int  # those that wait included
    num_waiting_reqs: int = 0


def _of_json(text: bytes) -> Load | None:
    try:
        ranks = msgspec.json.decode(text, type=list[_Rank] | _Rank)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if isinstance(ranks, _Rank):
        ranks = [ranks]
    if not ranks:
        return None
    waiting = sum(rank.num_waiting_reqs for rank in ranks)
    return Load(sum(rank.num_reqs for rank in ranks) - waiting, waiting)

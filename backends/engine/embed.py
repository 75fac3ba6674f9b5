"""Texts as vectors: what is asked, how a text's states become one vector, how it is sent. No torch.

A vector is the mean of the text's last states or its last one, as the model was trained for, of
length 1. Shapes: https://platform.openai.com/docs/api-reference/embeddings.
"""

import base64
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from backends.engine.types import JobRequest, Vector
from backends.engine.weights import Pooling

MAX_INPUTS = 2048

Encoding = Literal["float", "base64"]


class EmbeddingsBody(Struct, frozen=True, kw_only=True):
    model: str
    input: str | list[Any]  # texts, token ids or lists of ids
    encoding_format: Encoding | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None


class EmbedAsk(Struct, frozen=True, kw_only=True):
    job: JobRequest
    encoding: Encoding
    dimensions: int | None


class Embedding(Struct, frozen=True, kw_only=True):
    embedding: list[float] | str
    index: int
    object: str = "embedding"


class Embeddings(Struct, frozen=True, kw_only=True):
    data: list[Embedding]
    model: str
    usage: Any
    object: str = "list"


class Pool:
    """One text's states as they are computed, chunk by chunk. Sums in fp64, in order, so that
    chunks change nothing that fp32 could show."""

    __slots__ = ("_count", "_how", "_last", "_sum")

    def __init__(self, how: Pooling) -> None:
        self._how = how
        self._sum: NDArray[np.float64] | None = None
        self._last: NDArray[np.float64] | None = None
        self._count = 0

    def add(self, states: NDArray[np.float32]) -> None:
        """(tokens, hidden), normalised as before the head."""
        if self._how == "last":
            self._last = states[-1].astype(np.float64)
            return
        wide = states.astype(np.float64)
        self._sum = np.zeros(states.shape[1]) if self._sum is None else self._sum
        for state in wide:
            self._sum += state
        self._count += len(states)

    def result(self) -> list[float] | None:
        """Of length 1. None: the states are no numbers."""
        if self._how == "last":
            pooled = self._last
        else:
            pooled = None if self._sum is None else self._sum / self._count
        assert pooled is not None, "at least one token was computed"
        return _unit(pooled)


def _unit(vector: NDArray[np.float64]) -> list[float] | None:
    length = float(np.sqrt(np.square(vector).sum()))
    if not np.isfinite(length) or length == 0.0:
        return None
    return [float(value) for value in (vector / length).astype(np.float32)]


def rendered(vectors: list[Vector], ask: EmbedAsk, *, model: str, usage: Any) -> Embeddings:
    """The answer. With fewer `dimensions` the first ones, at length 1 again."""
    data = []
    for vector in sorted(vectors, key=lambda vector: vector.index):
        values = np.array(vector.values, np.float64)
        if ask.dimensions is not None and ask.dimensions < len(values):
            shorter = _unit(values[: ask.dimensions])
            values = np.array(shorter or [0.0] * ask.dimensions)
        small = values.astype("<f4")
        shown: list[float] | str = small.tolist()
        if ask.encoding == "base64":
            shown = base64.b64encode(small.tobytes()).decode()
        data.append(Embedding(embedding=shown, index=vector.index))
    return Embeddings(data=data, model=model, usage=usage)

"""Counts a prompt's tokens with the tokenizer of one of our engines, in this process.

The engine is another program; it writes its tokenizer to a file once per model, and `tokenizers`
reads that without torch. Must not know requests. Invariant: counting takes a bounded time: what is
longer than `EXACT_CHARS` is counted at its beginning, and the rest by the same rate.
"""

import asyncio
import hashlib
import logging
import sys
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Final, Protocol, cast

log = logging.getLogger(__name__)

EXACT_CHARS: Final = 16_384  # a few milliseconds
MARGIN: Final = 1.15  # of what is only estimated
EXPORT_S: Final = 60.0


class _Tokenizer(Protocol):
    def encode(self, sequence: str, *, add_special_tokens: bool) -> Sized: ...


class TokenCounter:
    """Safe to share; never changes."""

    def __init__(self, tokenizer: _Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def open(cls, path: Path) -> "TokenCounter":
        """Raises ValueError for a file that is none."""
        import tokenizers  # the engine's extra: a gateway without engines has no use for it

        try:
            return cls(cast(_Tokenizer, tokenizers.Tokenizer.from_file(str(path))))
        except Exception as error:  # `tokenizers` raises bare Exception
            raise ValueError(f"no tokenizer: {error}") from error

    def count(self, texts: Sequence[str]) -> int:
        total, left, rest = 0, EXACT_CHARS, 0
        for text in texts:
            part = text if len(text) <= left else text[:left]
            total += len(self._tokenizer.encode(part, add_special_tokens=False))
            left -= len(part)
            rest += len(text) - len(part)
        if rest:
            total += -int(-rest * MARGIN * total // EXACT_CHARS)
        return total


async def exported(model: str, folder: Path) -> TokenCounter | None:
    """The counter of an engine's model; its file is made once and kept in `folder`. None: it cannot
    be had, and whoever counts goes on estimating."""
    path = folder / f"{_name(model)}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240  # at start
        if not await asyncio.to_thread(path.is_file):
            await _export(model, path)
        return await asyncio.to_thread(TokenCounter.open, path)
    except (OSError, ValueError, TimeoutError, ImportError) as error:
        log.warning("no_tokenizer", extra={"model": model, "reason": str(error)[:200]})
        return None


async def _export(model: str, path: Path) -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "backends.engine.export_tokenizer", model, str(path)),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(EXPORT_S):
            _, said = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        raise ValueError(said.decode(errors="replace").strip()[-200:])


def _name(model: str) -> str:
    """Another one when the file is another one."""
    path = Path(model).expanduser()
    stamp = ""
    if path.is_file():
        status = path.stat()
        stamp = f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    return hashlib.sha256(f"{model}:{stamp}".encode()).hexdigest()[:24]

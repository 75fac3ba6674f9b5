"""Text to tokens and back, from the vocabulary inside a GGUF file.

Byte-level BPE with the pre-tokenizer that the file names. Special tokens are recognised only in
the text of a template: what a user writes is always plain text, whatever it looks like.
Tokens to text is byte-exact and never splits a character.
"""

import codecs
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers

from backends.engine.errors import WeightsInvalid
from backends.engine.gguf import GgufFile

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's `enum llama_token_type`

# End-of-turn tokens by their text, as llama.cpp knows them: files often name only one of them.
_END_TEXTS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class Tokenizer:
    """Safe to share between threads: it never changes."""

    def __init__(
        self,
        vocabulary: Sequence[str],
        merges: Sequence[tuple[str, str]],
        pre_tokenizer: pre_tokenizers.PreTokenizer,
        *,
        special: frozenset[int] = frozenset(),
        end_tokens: frozenset[int] = frozenset(),
        bos: int | None = None,
    ) -> None:
        ids = {text: token for token, text in enumerate(vocabulary)}
        self._bpe = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=list(merges)))
        self._bpe.pre_tokenizer = pre_tokenizer
        self._special = {vocabulary[token]: token for token in special}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._special_pattern = (
            re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if special else None
        )
        self.size = len(vocabulary)
        self.special = special
        self.end_tokens = end_tokens
        self.bos = bos
        alphabet = _alphabet()
        self._bytes = [
            text.encode() if token in special else _token_bytes(text, alphabet)
            for token, text in enumerate(vocabulary)
        ]

    def save(self, path: Path) -> None:
        """The vocabulary as a `tokenizers` file. Special tokens are not in it: it counts plain
        text."""
        self._bpe.save(str(path))

    def encode(self, text: str) -> list[int]:
        """Plain text: `<|im_end|>` in it is six ordinary tokens."""
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def encode_template(self, text: str, *, sentinel: str) -> list[int]:
        """Text rendered by a template from contents that went through `shield` with the same
        sentinel: special tokens count where the template wrote them and nowhere else."""
        if self._special_pattern is None:
            return self.encode(text.replace(sentinel, ""))
        tokens: list[int] = []
        for piece in self._special_pattern.split(text):
            if piece in self._special:
                tokens.append(self._special[piece])
            elif piece:
                tokens += self.encode(piece.replace(sentinel, ""))
        return tokens

    def shield(self, text: str, *, sentinel: str) -> str:
        """Break every special token's text with the sentinel, which the caller made up afresh."""
        if self._special_pattern is None:
            return text
        return self._special_pattern.sub(lambda m: m[0][0] + sentinel + m[0][1:], text)

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token]

    def decoder(self, shown: frozenset[int] = frozenset()) -> "TextDecoder":
        """`shown`: special tokens whose text counts; all others have none."""
        return TextDecoder(self, self.special - shown if shown else self.special)

    def special_token(self, text: str) -> int | None:
        """The special token that is written so."""
        return self._special.get(text)

    def decode(self, tokens: Sequence[int]) -> str:
        decoder = self.decoder()
        return "".join(decoder.feed(token) for token in tokens) + decoder.flush()


class TextDecoder:
    """Tokens to text, one at a time. Bytes of an unfinished character wait for the rest; bytes
    that can never be one become U+FFFD, exactly as `bytes.decode(errors="replace")` would."""

    __slots__ = ("_decode", "_hidden", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        if token in self._hidden:
            return ""
        return self._decode.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        return self._decode.decode(b"", final=True)


def from_gguf(file: GgufFile) -> Tokenizer:
    """Raises WeightsInvalid for a tokenizer that we could only imitate."""
    model = file.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise WeightsInvalid(file.path, f"tokenizer model `{model}` is not supported (gpt2 is)")
    vocabulary = file.texts("tokenizer.ggml.tokens")
    kinds = file.integers("tokenizer.ggml.token_type")
    if len(kinds) != len(vocabulary):
        raise WeightsInvalid(file.path, "tokenizer: as many token types as tokens are needed")
    special = frozenset(t for t, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED))
    ends = {file.integer(f"tokenizer.ggml.{key}", -1) for key in _END_KEYS}
    ends |= {t for t in special if vocabulary[t] in _END_TEXTS}
    bos = file.integer("tokenizer.ggml.bos_token_id", -1)
    adds_bos = file.metadata.get("tokenizer.ggml.add_bos_token", False) is True
    try:
        return Tokenizer(
            vocabulary,
            [_pair(merge) for merge in file.texts("tokenizer.ggml.merges")],
            _pre_tokenizer(file.text("tokenizer.ggml.pre", "default"), file),
            special=special,
            end_tokens=frozenset(t for t in ends if 0 <= t < len(vocabulary)),
            bos=bos if adds_bos and 0 <= bos < len(vocabulary) else None,
        )
    except (ValueError, TypeError) as error:
        raise WeightsInvalid(file.path, f"tokenizer: {error}") from error
    except Exception as error:  # `tokenizers` raises bare Exception for bad merges
        raise WeightsInvalid(file.path, f"tokenizer: {error}") from error


def _pre_tokenizer(name: str, file: GgufFile) -> pre_tokenizers.PreTokenizer:
    """llama.cpp's `tokenizer.ggml.pre`. A wrong one gives wrong tokens silently, so an unknown
    one is refused."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        # llama.cpp: first split off every digit, then GPT-2's pattern on what is between.
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    if name in ("gpt-2", "gpt2"):
        return byte_level
    raise WeightsInvalid(
        file.path, f"pre-tokenizer `{name}` is not supported (smollm and gpt-2 are)"
    )


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


@lru_cache(maxsize=1)
def _alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (`bytes_to_unicode`), reversed."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    shifted = {chr(256 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in plain} | shifted


def _token_bytes(text: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[character] for character in text])
    except KeyError:
        return text.encode()  # a token added by hand, outside the byte alphabet

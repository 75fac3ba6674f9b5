"""Text to tokens and back, from the vocabulary in a GGUF file or from tokenizer.json.

Byte-level BPE with the pre-tokenizer that the file names. Special tokens are recognised only in
the text of a template: what a user writes is always plain text, whatever it looks like.
Tokens to text is byte-exact and never splits a character.
"""

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec
import tokenizers
from msgspec import Struct
from tokenizers import Regex, models, pre_tokenizers

from backends.engine.errors import WeightsInvalid
from backends.engine.folder import ModelFolder
from backends.engine.gguf import GgufFile
from backends.engine.weights import Weights

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's `enum llama_token_type`

# End-of-turn tokens by their text, as llama.cpp knows them: files often name only one of them.
_END_TEXTS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class Tokenizer:
    """Safe to share between threads: it never changes."""

    def __init__(
        self,
        vocabulary: Sequence[str],
        bpe: tokenizers.Tokenizer,
        *,
        special: frozenset[int] = frozenset(),
        visible: frozenset[int] = frozenset(),
        end_tokens: frozenset[int] = frozenset(),
        bos: int | None = None,
        suffix: tuple[int, ...] = (),
        size: int | None = None,
    ) -> None:
        """`bpe` knows no special tokens. `visible`: those whose text is part of what is said,
        though only a template writes them. `size`: of the model's vocabulary; ids that have no
        text say nothing. `suffix`: what closes a text that is to be embedded."""
        self._bpe = bpe
        marked = special | visible
        self._special = {vocabulary[token]: token for token in sorted(marked)}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._special_pattern = (
            re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if marked else None
        )
        self.size = size or len(vocabulary)
        self.special = special | frozenset(range(len(vocabulary), self.size))
        self.end_tokens = end_tokens
        self.bos = bos
        self.suffix = suffix
        alphabet = _alphabet()
        self._bytes = [
            text.encode() if token in marked else _token_bytes(text, alphabet)
            for token, text in enumerate(vocabulary)
        ]
        self._bytes += [b""] * (self.size - len(vocabulary))

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


def from_weights(weights: Weights) -> Tokenizer:
    """Raises WeightsInvalid for a tokenizer that we could only imitate."""
    return from_folder(weights) if isinstance(weights, ModelFolder) else from_gguf(weights)


def from_gguf(file: GgufFile) -> Tokenizer:
    """Raises WeightsInvalid for a tokenizer that we could only imitate."""
    model = file.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise WeightsInvalid(file.path, f"tokenizer model `{model}` is not supported (gpt2 is)")
    vocabulary = file.texts("tokenizer.ggml.tokens")
    kinds = file.integers("tokenizer.ggml.token_type")
    if len(kinds) != len(vocabulary):
        raise WeightsInvalid(file.path, "tokenizer: as many token types as tokens are needed")
    special = frozenset(t for t, kind in enumerate(kinds) if kind == _CONTROL)
    visible = frozenset(t for t, kind in enumerate(kinds) if kind == _USER_DEFINED)
    ends = {file.integer(f"tokenizer.ggml.{key}", -1) for key in _END_KEYS}
    ends |= {t for t in special if vocabulary[t] in _END_TEXTS}
    bos = file.integer("tokenizer.ggml.bos_token_id", -1)
    adds_bos = file.metadata.get("tokenizer.ggml.add_bos_token", False) is True
    pre = _pre_tokenizer(file.text("tokenizer.ggml.pre", "default"), file)
    try:
        bpe = byte_level_bpe(
            vocabulary,
            [_pair(merge) for merge in file.texts("tokenizer.ggml.merges")],
            pre.pre_tokenizer,
            ignore_merges=pre.ignores_merges,
        )
    except (ValueError, TypeError) as error:
        raise WeightsInvalid(file.path, f"tokenizer: {error}") from error
    except Exception as error:  # `tokenizers` raises bare Exception for bad merges
        raise WeightsInvalid(file.path, f"tokenizer: {error}") from error
    return Tokenizer(
        vocabulary,
        bpe,
        special=special,
        visible=visible,
        end_tokens=frozenset(t for t in ends if 0 <= t < len(vocabulary)),
        bos=bos if adds_bos and 0 <= bos < len(vocabulary) else None,
    )


def byte_level_bpe(
    vocabulary: Sequence[str],
    merges: Sequence[tuple[str, str]],
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    *,
    ignore_merges: bool = False,
) -> tokenizers.Tokenizer:
    ids = {text: token for token, text in enumerate(vocabulary)}
    _check_merges(ids, merges)
    bpe = tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=list(merges), ignore_merges=ignore_merges)
    )
    bpe.pre_tokenizer = pre_tokenizer
    return bpe


def _check_merges(ids: Mapping[str, int], merges: Iterable[tuple[str, str]]) -> None:
    """The library panics at a merge that makes no token. Raises ValueError."""
    for left, right in merges:
        if not (left in ids and right in ids and left + right in ids):
            raise ValueError(f"merge {left[:40]!r} {right[:40]!r} makes no token")


class _AddedToken(Struct, frozen=True):
    id: int
    content: str
    special: bool = False


class _BpeModel(Struct, frozen=True):
    vocab: dict[str, int]
    merges: list[tuple[str, str] | str] = []
    byte_fallback: bool = False


class _TokenizerFile(Struct, frozen=True):
    """What we look at in tokenizer.json; the library reads the rest."""

    model: _BpeModel
    added_tokens: list[_AddedToken] = []
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")


def from_folder(folder: ModelFolder) -> Tokenizer:
    """From tokenizer.json. Raises WeightsInvalid."""
    path = folder.path / "tokenizer.json"
    try:
        data = path.read_bytes()
        file = msgspec.json.decode(data, type=_TokenizerFile)
        merges = file.model.merges
        pairs = (_pair(merge) if isinstance(merge, str) else merge for merge in merges)
        _check_merges(file.model.vocab, pairs)
        whole = tokenizers.Tokenizer.from_buffer(data)
        plain = {**msgspec.json.decode(data), "added_tokens": [], "post_processor": None}
        plain |= {"truncation": None, "padding": None}
        bpe = tokenizers.Tokenizer.from_buffer(msgspec.json.encode(plain))
    except OSError as error:
        raise WeightsInvalid(path, f"cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise WeightsInvalid(path, f"tokenizer: {error}") from error
    except Exception as error:  # `tokenizers` raises bare Exception for what it cannot read
        raise WeightsInvalid(path, f"tokenizer: {error}") from error
    if file.model.byte_fallback or b"ByteLevel" not in bytes(file.pre_tokenizer):
        raise WeightsInvalid(path, "only byte-level BPE is supported, not SentencePiece's")
    texts = {token: text for text, token in file.model.vocab.items()}
    texts |= {added.id: added.content for added in file.added_tokens}
    size = folder.config.vocab_size
    if not texts or min(texts) < 0 or max(texts) >= size:
        raise WeightsInvalid(path, f"ids of tokens are not all below the model's {size}")
    vocabulary = [texts.get(token, "") for token in range(max(texts) + 1)]
    special = frozenset(added.id for added in file.added_tokens if added.special)
    visible = frozenset(added.id for added in file.added_tokens if not added.special)
    ends = set(folder.end_tokens) | {t for t in special if vocabulary[t] in _END_TEXTS}
    bos, suffix = _framing(whole)
    return Tokenizer(
        vocabulary,
        bpe,
        special=special,
        visible=visible,
        end_tokens=frozenset(t for t in ends if 0 <= t < size),
        bos=bos,
        suffix=suffix,
        size=size,
    )


def _framing(whole: tokenizers.Tokenizer) -> tuple[int | None, tuple[int, ...]]:
    """What the post-processor puts before and after a text."""
    inner = whole.encode("a", add_special_tokens=False).ids
    framed = whole.encode("a").ids
    for before in (0, 1):
        if framed[before : before + len(inner)] == inner:
            return (framed[0] if before else None), tuple(framed[before + len(inner) :])
    return None, ()


class _Pre(Struct, frozen=True):
    pre_tokenizer: pre_tokenizers.PreTokenizer
    ignores_merges: bool = False  # a word that is a token is that token, however it merges


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = _WORDS % r"\p{N}{1,3}", _WORDS % r"\p{N}"


def _pre_tokenizer(name: str, file: GgufFile) -> _Pre:
    """llama.cpp's `tokenizer.ggml.pre`. A wrong one gives wrong tokens silently, so an unknown
    one is refused."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match name:
        case "smollm":
            # llama.cpp: first split off every digit, then GPT-2's pattern on what is between.
            digits = pre_tokenizers.Digits(individual_digits=True)
            return _Pre(pre_tokenizers.Sequence([digits, byte_level]))
        case "gpt-2" | "gpt2":
            return _Pre(byte_level)
        case "llama3" | "llama-v3" | "llama-bpe":
            return _Pre(_split(_LLAMA3), ignores_merges=True)
        case "smaug-bpe":
            return _Pre(_split(_LLAMA3))
        case "qwen2" | "deepseek-r1-qwen":
            return _Pre(_split(_QWEN2))
        case _:
            raise WeightsInvalid(
                file.path,
                f"pre-tokenizer `{name}` is not supported (gpt-2, llama-bpe, qwen2 and smollm are)",
            )


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip


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

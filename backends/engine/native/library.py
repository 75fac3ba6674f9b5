"""Build `step.cpp` for this CPU, once, and load it.

The result is kept in the cache directory under a name made of all that it depends on: source,
flags, compiler, the CPU's features. Knows nothing of models. Whatever goes wrong is a
`Unavailable` with the reason; the caller then computes with torch.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, Structure, c_float, c_int32, c_uint16, c_void_p
from pathlib import Path

from msgspec import Struct

SOURCE = Path(__file__).with_name("step.cpp")
_FLAGS = (
    "-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread",
)  # fmt: skip
_NEEDED = ("avx2", "fma", "f16c")
_COMPILERS = ("c++", "g++", "clang++")
_BUILD_LIMIT_S = 120


class Unavailable(Exception):
    """Why the compiled step cannot be used here."""


class Toolchain(Struct, frozen=True, kw_only=True):
    """What a build depends on beside its source."""

    compiler: Path | None
    cpu_features: str
    cache: Path

    @classmethod
    def of_this_machine(cls, cache: Path, *, cpuinfo: Path = Path("/proc/cpuinfo")) -> "Toolchain":
        found = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
        features = ""
        if platform.machine() == "x86_64" and cpuinfo.exists():
            lines = cpuinfo.read_text().splitlines()
            features = next((line for line in lines if line.startswith("flags")), "")
        return cls(compiler=Path(found) if found else None, cpu_features=features, cache=cache)


class WeightStruct(Structure):
    _fields_ = (
        ("format", c_int32), ("rows", c_int32), ("columns", c_int32), ("data", c_void_p),
        ("scales", POINTER(c_uint16)),
    )  # fmt: skip


class LayerStruct(Structure):
    _fields_ = (
        ("attention_norm", c_void_p), ("feed_norm", c_void_p), ("qkv_bias", c_void_p),
        ("output_bias", c_void_p), ("query_norm", c_void_p), ("key_norm", c_void_p),
        ("rotates", c_int32), ("qkv", WeightStruct),
        ("output", WeightStruct), ("gate_up", WeightStruct), ("down", WeightStruct),
    )  # fmt: skip


class ConfigStruct(Structure):
    _fields_ = (
        ("layers", c_int32), ("hidden", c_int32), ("feed_forward", c_int32), ("heads", c_int32),
        ("kv_heads", c_int32), ("head_dim", c_int32), ("vocab", c_int32), ("kv_blocks", c_int32),
        ("threads", c_int32), ("epsilon", c_float), ("layer", POINTER(LayerStruct)),
        ("norm", c_void_p), ("head", WeightStruct), ("cosines", c_void_p), ("sines", c_void_p),
        ("keys", c_void_p), ("values", c_void_p),
    )  # fmt: skip


class StepStruct(Structure):
    _fields_ = (
        ("tokens", c_int32), ("rows", c_int32), ("wanted", c_int32), ("x", c_void_p),
        ("row", c_void_p), ("tables", c_void_p), ("index", c_void_p), ("logits", c_void_p),
        ("best", c_void_p),
    )  # fmt: skip


class Library:
    """The functions of the built file."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        self.open = loaded.ml_open
        self.open.argtypes, self.open.restype = [POINTER(ConfigStruct)], c_void_p
        self.close = loaded.ml_close
        self.close.argtypes, self.close.restype = [c_void_p], None
        self.step = loaded.ml_step
        self.step.argtypes, self.step.restype = [c_void_p, POINTER(StepStruct)], None
        self.copy_block = loaded.ml_copy_block
        self.copy_block.argtypes, self.copy_block.restype = [c_void_p, c_int32, c_int32], None
        self.linear = loaded.ml_linear
        self.linear.argtypes = [POINTER(WeightStruct), c_void_p, c_int32, c_void_p]
        self.linear.restype = None


def load(tools: Toolchain) -> Library:
    """From the cache, or built now, which takes some seconds. Raises Unavailable."""
    features = tools.cpu_features.split()
    if missing := [name for name in _NEEDED if name not in features]:
        raise Unavailable(f"this CPU lacks {', '.join(missing)}")
    if tools.compiler is None:
        raise Unavailable(f"no C++ compiler ({', '.join(_COMPILERS)})")
    path = tools.cache / f"step-{_key(tools)}.so"
    try:
        if not path.exists():
            _build(tools.compiler, path)
        if path.stat().st_uid != os.geteuid():
            raise Unavailable(f"{path} belongs to somebody else")
        return Library(path)
    except (OSError, AttributeError) as error:
        raise Unavailable(f"{path} cannot be used: {error}") from error


def _key(tools: Toolchain) -> str:
    parts = [
        SOURCE.read_bytes(), " ".join(_FLAGS).encode(), _version(tools.compiler),
        " ".join(sorted(tools.cpu_features.split())).encode(),
    ]  # fmt: skip
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _version(compiler: Path | None) -> bytes:
    """Its file's size and time say it as well as asking it would, and at once."""
    stat = compiler.stat() if compiler else None
    return b"" if stat is None else f"{compiler} {stat.st_size} {stat.st_mtime_ns}".encode()


def _build(compiler: Path, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / "step.so"
        command = [str(compiler), *_FLAGS, str(SOURCE), "-o", str(built)]
        try:
            subprocess.run(  # noqa: S603  # the compiler that the operator has on the path
                command, check=True, capture_output=True, timeout=_BUILD_LIMIT_S
            )
        except subprocess.CalledProcessError as error:
            last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise Unavailable(f"{compiler.name} failed: {' '.join(last)}") from error
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"{compiler.name} took over {_BUILD_LIMIT_S} s") from error
        built.replace(target)  # whole or not there at all

"""What a model needs before it is loaded, and what is said when it is too much."""

import io
from pathlib import Path

import pytest

from backends.engine import memory
from backends.engine.errors import StartFailed
from backends.engine.gguf import GgufFile
from backends.engine.progress import Loading
from backends.engine.serve import build
from backends.engine.shape import read_shape
from backends.settings import EngineSettings
from tests.fakes.clock import FakeClock
from tests.fakes.gguf import tiny_llama

GB = 1_000_000_000


def test_too_little_memory_says_what_would_fit(tmp_path: Path) -> None:
    """Refused before anything is allocated; the pool that it names is then accepted."""
    path = str(tiny_llama(tmp_path / "tiny.gguf"))
    with pytest.raises(
        StartFailed, match=r"tiny needs about 2\.\d+ GB.*kv_memory_gb = 1\.\d+ would"
    ):
        build(
            EngineSettings(name="e", model=path, kv_memory_gb=2.0),
            available_bytes=lambda: round(1.5 * GB),
        )
    build(
        EngineSettings(name="e", model=path, kv_memory_gb=1.15),
        available_bytes=lambda: round(1.5 * GB),
    )
    with pytest.raises(StartFailed, match="the weights alone do not fit"):
        build(EngineSettings(name="e", model=path), available_bytes=lambda: 1)
    build(EngineSettings(name="e", model=path), available_bytes=lambda: None)


def test_fewer_bits_need_less(file: GgufFile) -> None:
    """fp32 > fp16 > int8 > int4, and torch always takes fp32."""
    shape = read_shape(file)
    sizes = [
        memory.need(file, shape, dtype=dtype, is_torch=False, pool_bytes=0).weights
        for dtype in ("float32", "float16", "int8", "int4")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4
    assert sizes[0] == 4 * (shape.body_params + shape.head_params)
    wide = memory.need(file, shape, dtype="auto", is_torch=True, pool_bytes=0)
    assert wide.weights == sizes[0]


def test_a_control_group_counts(tmp_path: Path) -> None:
    """The smaller of free memory and what the group leaves, its file cache not counted as used."""
    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    meminfo.write_text("MemTotal: 10 kB\nMemAvailable: 8000 kB\n")
    assert memory.available_bytes(meminfo=meminfo, group=group) == 8000 * 1024
    group.mkdir()
    for name, text in (
        ("memory.max", "5000000\n"), ("memory.current", "4000000\n"),
        ("memory.stat", "anon 5\ninactive_file 1000000\n"),
    ):  # fmt: skip
        (group / name).write_text(text)
    assert memory.available_bytes(meminfo=meminfo, group=group) == 2_000_000
    (group / "memory.max").write_text("max\n")
    assert memory.available_bytes(meminfo=meminfo, group=group) == 8000 * 1024
    assert memory.available_bytes(meminfo=tmp_path / "none", group=tmp_path / "none") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"weights": "int8", "dtype": "float32"}, "exclude each other")],
)
def test_contradictions_are_refused(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    """Rounded weights and exact ones cannot both be had."""
    path = str(tiny_llama(tmp_path / "tiny.gguf"))
    with pytest.raises(StartFailed, match=message):
        build(EngineSettings(name="e", model=path, **changes))  # type: ignore[arg-type]  # Literals


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_loading_is_lines_in_a_log_and_a_bar_on_a_terminal() -> None:
    """No line for what is over at once; then one every few seconds; a bar only on a terminal."""
    clock, out = FakeClock(), io.StringIO()
    loading = Loading("e", clock, out=out)
    loading.at(0.1)
    assert out.getvalue() == ""
    clock.advance(3.0)
    loading.at(0.63)
    assert out.getvalue() == "meterline engine: e is loading, 63 %\n"
    loading.at(0.7)
    clock.advance(60.0)
    loading.at(1.0)
    assert out.getvalue().count("\n") == 1
    assert loading.percent == 100
    screen = Terminal()
    shown = Loading("e", clock, out=screen)
    shown.at(0.5)
    shown.at(1.0)
    assert "loading e" in screen.getvalue()

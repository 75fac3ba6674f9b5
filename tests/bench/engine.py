"""The bundled engine in its modes, beside llama.cpp and transformers on the same weights and token
ids in the same run. `meterline engine bench` is the part without the others.

llama.cpp runs in an interpreter of its own if `METERLINE_PEERS_PYTHON` names one that has
`llama_cpp`; transformers, if it can be imported here. What is not installed has no rows.
`METERLINE_BENCH_PARTS` (comma-separated) picks some of the parts. With `METERLINE_BENCH_ONE_CORE=1`
everybody computes on one thread and all seconds are CPU seconds of the process: on a shared
machine that is what can be compared.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from backends.engine import bench, roofline, tokenizer
from backends.engine.bench import OUTPUT, PROMPT, Chosen, Figure, Request, Rig
from backends.engine.draft import DraftModel
from backends.engine.gguf import GgufFile
from backends.engine.kv import blocks_for
from backends.engine.serve import default_threads, prepare_environment
from backends.engine.stops import StopMatcher
from backends.engine.types import Job, JobRequest, Row, Sampling
from backends.engine.types import Sequence as Choice
from backends.engine.weights import BUNDLED_NAME, open_weights
from tests.bench.report import Table
from tests.fakes.gguf import deeper

MODES = {
    "default": Chosen(kernels="native"),
    "exact": Chosen(kernels="native", dtype="float32"),
    "torch": Chosen(kernels="torch", dtype="float32"),
}


class _Rows(Table):
    """Shown as they come: all take minutes."""

    def figure(self, figure: Figure, who: str) -> None:
        share = "" if figure.of_limit is None else figure.of_limit
        cells = (figure.what, who, round(figure.value, 2), figure.unit, share)
        self.add(*cells)
        sys.stderr.write(" | ".join(map(str, cells)) + "\n")

    def figures(self, figures: Iterable[Figure], who: str) -> None:
        for figure in figures:
            self.figure(figure, who)


class _Bench:
    """What all parts share."""

    def __init__(self) -> None:
        prepare_environment(os.environ)
        self.file = open_weights(BUNDLED_NAME)
        self.words = tokenizer.from_gguf(self.file)
        self.one_core = os.environ.get("METERLINE_BENCH_ONE_CORE") == "1"
        self.threads = 1 if self.one_core else default_threads()
        self.now = time.process_time if self.one_core else time.perf_counter
        self.machine = roofline.measure(self.threads)
        self.table = _Rows("engine", ["what", "with", "value", "unit", "of the limit, %"])
        self.table.figures(
            [
                Figure("memory read", self.machine.bytes_s / 1e9, "GB/s"),
                Figure("fp32 products", self.machine.flops_s / 1e9, "GFLOP/s"),
            ],
            "this machine",
        )

    def rig(self, mode: str, *, rounds: int = 3, one_core: bool = False) -> Rig:
        is_alone = one_core or self.one_core
        chosen = structs.replace(MODES[mode], one_core=is_alone)
        runner = bench.open_runner(self.file, chosen, bench.KV_BLOCKS)
        return Rig(runner, self.words, rounds=rounds, by_cpu=is_alone)


def run() -> Table:
    b = _Bench()
    parts: dict[str, Callable[[_Bench], None]] = {
        "one-core": _one_core,
        "default": lambda b: _mode(b, "default"),
        "exact": lambda b: _mode(b, "exact"),
        "torch": lambda b: _mode(b, "torch"),
        "mixed": _mixed,
        "prefix": lambda b: b.table.figures(bench.shared_prefix(b.rig("default")), "default"),
        "guessing": _guessing,
        "draft-model": _draft_model,
        "llama.cpp": _llama_cpp,
        "transformers": _transformers,
        "memory": _memory,
    }
    asked = os.environ.get("METERLINE_BENCH_PARTS", ",".join(parts)).split(",")
    for name in asked:
        parts[name](b)
    return b.table


def _mode(b: _Bench, mode: str) -> None:
    rig = b.rig(mode)
    b.table.figures(bench.basics(rig, b.machine), mode)
    if mode == "default":
        b.table.figures(bench.overhead(rig), mode)


def _mixed(b: _Bench) -> None:
    b.table.figures(bench.mixed(b.rig("default", rounds=2), b.machine), "default")


def _guessing(b: _Bench) -> None:
    for mode in ("default", "exact"):
        b.table.figures(bench.guessing(b.rig(mode, one_core=True)), f"{mode}, one core")


def _draft_model(b: _Bench) -> None:
    """Greedy text must not change by it. Two pairs: the file in float32 with itself as stored, and
    a model of twice the layers, of which the second half adds nothing, with the original."""
    prompt = b.words.encode(bench.PROSE)[:60]
    with tempfile.TemporaryDirectory() as folder:
        deep = GgufFile(deeper(b.file, Path(folder) / "deep.gguf", times=2))
        for name, file in (("float32 with itself as stored", b.file), ("60 layers with 30", deep)):
            exact = Chosen(kernels="native", dtype="float32", one_core=True)
            target = bench.open_runner(file, exact, 24)
            second = bench.open_runner(b.file, Chosen(kernels="native", one_core=True), 24)
            drafter = DraftModel(second.decoder, second.facts, b.words)
            rig = Rig(target, b.words, rounds=2, by_cpu=True)
            texts = set()
            for how, drafts in (("off", 0), ("on", 15)):
                target.drafter = drafter if drafts else None
                run = rig.measure([(prompt, 96)], max_drafts=drafts)
                texts.add(run.seen[0].text)
                figure = Figure(f"draft model {how}, {name}", run.decode_rate(96), "out tok/s")
                b.table.figure(figure, "one core")
            assert len(texts) == 1, "guesses must not change a text"


def _one_core(b: _Bench) -> None:
    """The decoders alone on one thread, in its CPU time: what others do at the same time hardly
    shows here."""
    for mode in MODES:
        rig = b.rig(mode, one_core=True)
        pool = iter(range(bench.KV_BLOCKS))
        prompt = _row(rig, 99, 0, 512, pool)
        b.table.figure(
            Figure("one core: prefill of 512", 512 / _cpu_s(rig, [prompt]), "tok/CPU-s"), mode
        )
        rows = [_row(rig, i, 199, 1, pool) for i in range(16)]
        for batch in (1, 8, 16):
            took_ms = _cpu_s(rig, rows[:batch]) * 1e3
            b.table.figure(
                Figure(f"one core: step of {batch}, context 200", took_ms, "CPU-ms"), mode
            )


def _row(rig: Rig, number: int, start: int, count: int, pool: Iterator[int]) -> Row:
    prompt = rig.prompt(number, start + count)
    request = JobRequest(
        prompts=(tuple(prompt),), max_tokens=(1,), sampling=Sampling(temperature=0.0)
    )
    sequence = Choice(
        Job(number, request, 0), 0, prompt, arrival=number, max_tokens=1, seed=0,
        decoder=rig.words.decoder(), stops=StopMatcher(()),
    )  # fmt: skip
    sequence.blocks = [next(pool) for _ in range(blocks_for(start + count))]
    return Row(sequence, start, count)


def _cpu_s(rig: Rig, rows: Sequence[Row]) -> float:
    took = []
    for _ in range(rig.rounds + 2):
        started = time.thread_time()
        rig.runner.run(rows)
        took.append(time.thread_time() - started)
    return min(took)


def _memory(b: _Bench) -> None:
    """Of an engine process that has served the mixed workload, with the default pool."""
    code = (
        "import resource\n"
        "from tests.bench.engine import _Bench, bench\n"
        "b = _Bench(); rig = b.rig('default', rounds=1)\n"
        "rig.measure(bench.mixed_requests(rig))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    b.table.figure(Figure("memory, most resident", int(told.split()[-1]) / 1e3, "MB"), "default")


# ── others on the same weights ────────────────────────────────────────────────────────────────


def _cases(rig: Rig) -> list[dict[str, Any]]:
    mixed = bench.mixed_requests(rig)
    shared = list(rig.texts[:400])
    cases: list[dict[str, Any]] = [
        {"name": "prefill of 512", "requests": [(rig.prompt(1, 512), 1)]},
        *(
            {
                "name": f"{batch} at once, {PROMPT}+{OUTPUT}",
                "requests": [(rig.prompt(i, PROMPT), OUTPUT) for i in range(batch)],
            }
            for batch in (1, 8, 16)
        ),
        {"name": "32 mixed, continuous", "requests": mixed},
        {
            "name": "16 sharing 400 tokens, with reuse",
            "shared": 400,
            "requests": [([*shared, *rig.prompt(i, 20)], 32) for i in range(16)],
        },
        {
            "name": "16 sharing 400 tokens, without reuse",
            "requests": [([*shared, *rig.prompt(i, 20)], 32) for i in range(16)],
        },
    ]
    return cases


def _llama_cpp(b: _Bench) -> None:
    python = os.environ.get("METERLINE_PEERS_PYTHON", sys.executable)
    script = Path(__file__).with_name("llama_cpp_peer.py")
    has_it = subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, check=False)
    if has_it.returncode != 0:
        sys.stderr.write("llama.cpp is not installed: no rows\n")
        return
    rig = Rig(bench.open_runner(b.file, MODES["default"], 2), b.words)
    work = {
        "model": str(b.file.path), "threads": b.threads, "rounds": 1,
        "by_cpu": b.one_core, "cases": _cases(rig),
    }  # fmt: skip
    told = subprocess.run(
        [python, str(script)], input=json.dumps(work), capture_output=True, text=True, check=True
    ).stdout
    found = json.loads(told)
    for case in work["cases"]:
        run = found[case["name"]]
        tokens = sum(count for _, count in case["requests"])
        if case["name"].startswith("prefill"):
            b.table.figure(Figure(case["name"], 512 / run["took_s"], "tok/s"), "llama.cpp")
            continue
        b.table.figure(Figure(case["name"], tokens / run["took_s"], "out tok/s"), "llama.cpp")
        if len(case["requests"]) > 16 or "sharing" in case["name"]:
            name = f"{case['name']}, first token p50"
            b.table.figure(Figure(name, run["first_p50_s"] * 1e3, "ms"), "llama.cpp")


def _transformers(b: _Bench) -> None:
    """Static batches in fp32, as its `generate` does them: prompts padded on the left."""
    if importlib.util.find_spec("transformers") is None:
        sys.stderr.write("transformers is not installed: no rows\n")
        return
    import torch

    from tests.bench.transformers_peer import load

    torch.set_num_threads(b.threads)
    model = load(b.file)
    rig = Rig(bench.open_runner(b.file, MODES["default"], 2), b.words)

    def generate(requests: Sequence[Request]) -> float:
        longest = max(len(prompt) for prompt, _ in requests)
        output = max(count for _, count in requests)
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p, _ in requests])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in requests])
        started = b.now()
        model.generate(
            ids, attention_mask=mask, do_sample=False, min_new_tokens=output,
            max_new_tokens=output, pad_token_id=0,
        )  # fmt: skip
        return b.now() - started

    took_s = min(generate([(rig.prompt(1, 512), 1)]) for _ in range(2))
    b.table.figure(Figure("prefill of 512", 512 / took_s, "tok/s"), "transformers")
    for batch in (1, 8, 16):
        requests = [(rig.prompt(i, PROMPT), OUTPUT) for i in range(batch)]
        rate = batch * OUTPUT / generate(requests)
        name = f"{batch} at once, {PROMPT}+{OUTPUT}"
        b.table.figure(Figure(name, rate, "out tok/s"), "transformers")

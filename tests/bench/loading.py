"""What a start costs: seconds and resident memory, in a process of its own, so that nothing is
imported or mapped before. Prints one JSON object; `engine.py` runs it."""

import json
import os
import sys
import time
from pathlib import Path

from backends.engine.serve import cache_folder, default_threads, prepare_environment


def resident_gb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e9
    raise RuntimeError("no VmRSS in /proc/self/status")


def main() -> None:
    prepare_environment(os.environ)
    began = time.perf_counter()
    from backends.engine import tokenizer
    from backends.engine.native.library import Toolchain
    from backends.engine.runner import CpuRunner
    from backends.engine.shape import pool_blocks, read_shape
    from backends.engine.weights import BUNDLED_NAME, open_weights
    from backends.settings import EngineSettings

    imported = time.perf_counter()
    file = open_weights(BUNDLED_NAME)
    tokenizer.from_weights(file)
    settings = EngineSettings(name="bench")
    blocks = pool_blocks(read_shape(file), settings.kv_memory_gb)
    runner = CpuRunner(
        file, kv_blocks=blocks, threads=default_threads(), dtype="auto", kernels=settings.kernels,
        tools=Toolchain.of_this_machine(cache_folder(os.environ)),
    )  # fmt: skip
    loaded = time.perf_counter()
    found = {"import_s": imported - began, "load_s": loaded - imported, "empty_gb": resident_gb()}
    runner.copy_blocks([(0, block) for block in range(1, blocks)])
    found["full_gb"] = resident_gb()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

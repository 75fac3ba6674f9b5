"""llama.cpp on given token ids, with continuous batching as its server does it: every step has one
token of each answer being generated and, in what is left of the batch, prompts of newcomers.

Run by the engine benchmark with an interpreter that has `llama_cpp`, which need not be the
project's: it reads a workload (JSON) from standard input and writes seconds (JSON) to standard
output. It imports nothing of the project.
"""

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp as lib
import numpy as np

SLOTS = 16
BATCH = 512


class Peer:
    """A model and a context with room for 16 sequences."""

    def __init__(self, path: str, threads: int, *, by_cpu: bool, shares: bool = False) -> None:
        """`shares`: one pool for all sequences, which copies of a prefix need."""
        self.now = time.process_time if by_cpu else time.perf_counter
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        params = lib.llama_context_default_params()
        params.n_ctx = SLOTS * 1024
        params.n_batch = params.n_ubatch = BATCH
        params.n_seq_max = SLOTS
        params.kv_unified = shares
        params.n_threads = params.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, params)
        self.batch = lib.llama_batch_init(BATCH, 0, 1)
        self.memory = lib.llama_get_memory(self.context)

    def serve(self, requests: list[Any], shared: int = 0) -> dict[str, float]:
        """All at once. Of each prompt the first `shared` tokens are computed before the clock
        starts and copied, as its server does with a cached prefix."""
        lib.llama_memory_clear(self.memory, True)
        if shared:
            self._compute([(0, i, token, False) for i, token in enumerate(requests[0][0][:shared])])
            for slot in range(1, SLOTS):
                lib.llama_memory_seq_cp(self.memory, 0, slot, 0, shared)
        waiting = list(enumerate(requests))
        slots: list[Any] = [None] * SLOTS  # [request, tokens, computed, generated]
        first: dict[int, float] = {}
        started = self.now()
        while waiting or any(slots):
            for slot in range(SLOTS):
                if slots[slot] is None and waiting:
                    number, (prompt, _) = waiting.pop(0)
                    lib.llama_memory_seq_rm(self.memory, slot, shared, -1)
                    slots[slot] = [number, list(prompt), shared, 0]
            rows: list[Any] = []
            asks: list[tuple[int, int]] = []  # slot, row of its logits
            order = sorted((s for s in range(SLOTS) if slots[s]), key=lambda s: -bool(slots[s][3]))
            for slot in order:
                state = slots[slot]
                take = min(len(state[1]) - state[2], BATCH - len(rows))
                rows += [
                    (slot, at, state[1][at], at == len(state[1]) - 1)
                    for at in range(state[2], state[2] + take)
                ]
                state[2] += take
                if take and state[2] == len(state[1]):
                    asks.append((slot, len(rows) - 1))
            self._compute(rows)
            for slot, row in asks:
                state = slots[slot]
                first.setdefault(state[0], self.now() - started)
                state[1].append(self._best(row))
                state[3] += 1
                if state[3] == requests[state[0]][1]:
                    slots[slot] = None
        took = self.now() - started
        return {"took_s": took, "first_p50_s": sorted(first.values())[len(first) // 2]}

    def _compute(self, rows: list[Any]) -> None:
        for i, (slot, position, token, wants) in enumerate(rows):
            self.batch.token[i] = token
            self.batch.pos[i] = position
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = slot
            self.batch.logits[i] = wants
        self.batch.n_tokens = len(rows)
        if lib.llama_decode(self.context, self.batch) != 0:
            raise RuntimeError("llama_decode failed")

    def _best(self, row: int) -> int:
        at = lib.llama_get_logits_ith(self.context, row)
        logits = np.ctypeslib.as_array(
            ctypes.cast(at, ctypes.POINTER(ctypes.c_float)), (self.vocab,)
        )
        return int(logits.argmax())


def main() -> None:
    work = json.load(sys.stdin)
    found = {}
    for shares in (False, True):
        peer = Peer(work["model"], work["threads"], by_cpu=work["by_cpu"], shares=shares)
        peer.serve([(work["cases"][0]["requests"][0][0][:32], 4)])  # first calls are slow
        for case in work["cases"]:
            if bool(case.get("shared")) is shares:
                runs = [
                    peer.serve(case["requests"], case.get("shared", 0))
                    for _ in range(work["rounds"])
                ]
                found[case["name"]] = min(runs, key=lambda run: run["took_s"])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

"""`make conformance`: the corpus against this gateway, installed peers, or any base URL.

Against a URL the gateway must send the model `--model` to http://HOST:`--port`/v1, where the corpus
is played while this runs. Prints a table, writes bench-results/conformance.json; exit code 1 if a
case of ours, or of the URL's, fails.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path

import httpx
import msgspec

from tests import peers
from tests.bench.report import RESULTS, machine
from tests.conformance.corpus import CASES
from tests.conformance.judge import CorpusUpstream, Verdict, run
from tests.conformance.test_conformance import QUICK
from tests.fakes.gateway import backend, route, running

Found = dict[str, list[Verdict]]


def main() -> None:
    options = argparse.ArgumentParser(prog="make conformance", description=__doc__)
    options.add_argument("--url", help="base URL up to and including /v1")
    options.add_argument("--key", default="none", help="API key for it")
    options.add_argument("--model", default="conformance", help="model to ask it for")
    options.add_argument("--port", type=int, default=8199, help="where the corpus is played")
    options.add_argument("--peer", action="append", choices=peers.installed(), default=[])
    given = options.parse_args()
    found: Found = {}
    if given.url:
        headers = {"authorization": f"Bearer {given.key}"}
        found[given.url] = asyncio.run(_all(given.url, headers, given.model, given.port))
    else:
        found["Meterline"] = asyncio.run(_ours())
        for name in given.peer:
            with tempfile.TemporaryDirectory() as folder:
                asyncio.run(_peer(name, Path(folder), found))
    _show(found)
    mine = next(iter(found.values()))
    sys.exit(0 if all(verdict.ok for verdict in mine) else 1)


async def _ours() -> list[Verdict]:
    with tempfile.TemporaryDirectory() as folder:
        async with CorpusUpstream(CASES) as upstream:
            tables = backend("corpus", upstream.base_url, more=QUICK)
            tables += route("conformance", "corpus")
            async with running(Path(folder), tables=tables) as harness:
                url = f"{harness.server.base_url}/v1"
                return await _with(
                    upstream, url, harness.auth, "conformance", harness.forget_failures
                )


async def _peer(name: str, folder: Path, found: Found) -> None:
    async with CorpusUpstream(CASES) as upstream:
        with contextlib.ExitStack() as stack:
            peer = await asyncio.to_thread(
                stack.enter_context, peers.running(name, upstream.port, folder, "conformance")
            )
            headers = {"authorization": f"Bearer {peer.key}", **peer.headers}
            url = f"http://127.0.0.1:{peer.port}/v1"
            found[peer.name] = await _with(upstream, url, headers, "conformance")


async def _all(url: str, headers: dict[str, str], model: str, port: int) -> list[Verdict]:
    async with CorpusUpstream(CASES, port) as upstream:
        sys.stdout.write(f"The corpus is played at {upstream.base_url}\n")
        return await _with(upstream, url, headers, model)


async def _with(
    upstream: CorpusUpstream,
    url: str,
    headers: dict[str, str],
    model: str,
    between: object = None,
) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for number in range(len(CASES)):
        if callable(between):
            between()
        async with httpx.AsyncClient(
            base_url=url.rstrip("/") + "/", headers=headers, timeout=12, trust_env=False
        ) as client:
            verdicts.append(await run(client, upstream, number, model))
    return verdicts


def _show(found: Found) -> None:
    lines = [f"| case | expected | {' | '.join(found)} |", "|---" * (len(found) + 2) + "|"]
    for number, case in enumerate(CASES):
        cells = []
        for verdicts in found.values():
            verdict = verdicts[number]
            mark = "" if verdict.ok else "**✗** "
            why = "" if verdict.ok else f": {verdict.why[:60]}"
            cells.append(f"{mark}{verdict.saw}{why}".replace("|", "\\|"))
        lines.append(f"| {case.id} | {case.must.value} | {' | '.join(cells)} |")
    sums = [f"{sum(v.ok for v in verdicts)} of {len(CASES)}" for verdicts in found.values()]
    lines.append(f"| **right** | | {' | '.join(sums)} |")
    sys.stdout.write("\n".join(lines) + "\n")
    RESULTS.mkdir(exist_ok=True)
    facts = {
        "machine": machine(),
        "cases": [case.id for case in CASES],
        "verdicts": found,
    }
    data = msgspec.json.format(msgspec.json.encode(facts))
    (RESULTS / "conformance.json").write_bytes(data + b"\n")
    (RESULTS / "conformance.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

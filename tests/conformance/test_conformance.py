"""The wire corpus against this gateway: every case, whole and streamed."""

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from msgspec import Struct

from tests.conformance.corpus import CASES, Case, Must
from tests.conformance.judge import CorpusUpstream, Seen, judge, run
from tests.fakes.gateway import Harness, backend, route, running

QUICK = "timeouts = { connect_s = 1, first_token_s = 1, inter_token_s = 1, total_s = 5 }"


class Lab(Struct, frozen=True):
    """A gateway before the corpus."""

    harness: Harness
    upstream: CorpusUpstream


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    """One gateway and one upstream for all cases."""
    async with CorpusUpstream(CASES) as upstream:
        tables = backend("corpus", upstream.base_url, more=QUICK) + route("conformance", "corpus")
        async with running(tmp_path_factory.mktemp("corpus"), tables=tables) as harness:
            yield Lab(harness, upstream)
            await harness.next_settled(len(harness.settled))
            assert not await harness.broken_laws()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.id for case in CASES])
async def test_case(lab: Lab, number: int) -> None:
    """What the upstream completed is complete; what it did not complete can be told."""
    lab.harness.forget_failures()
    settled = len(lab.harness.settled)
    async with httpx.AsyncClient(
        base_url=f"{lab.harness.server.base_url}/v1/", headers=lab.harness.auth, timeout=20
    ) as client:
        verdict = await run(client, lab.upstream, number, "conformance")
    assert verdict.ok, f"{CASES[number].id}: {verdict.saw}, {verdict.why}"
    record = (await lab.harness.next_settled(settled + 1))[-1]
    is_ok = record.outcome == "ok"
    assert is_ok == (verdict.saw == "complete"), record.outcome


@pytest.mark.parametrize(
    ("must", "seen", "ok"),
    [
        (Must.BROKEN, Seen(status=200, is_error=True), True),
        (Must.BROKEN, Seen(status=200, is_lost=True), True),
        (Must.BROKEN, Seen(status=502, is_error=True), True),
        (Must.BROKEN, Seen(status=200), False),
        (Must.BROKEN, Seen(status=200, is_done=True), False),
        (Must.BROKEN, Seen(status=200, is_error=True, is_done=True), False),
        (Must.COMPLETE, Seen(status=502, is_error=True), False),
        (Must.COMPLETE, Seen(status=200, is_done=True, text={0: "x"}), False),
        (Must.EITHER, Seen(status=502, is_error=True), True),
        (Must.EITHER, Seen(status=200, is_done=True), False),
    ],
)
def test_the_judge(must: Must, seen: Seen, ok: bool) -> None:
    """A lie is found: an answer that looks whole and is not, and an error that ends in [DONE]."""
    case = Case(name="x", stream=True, steps=(), must=must)
    assert judge(case, seen).ok is ok

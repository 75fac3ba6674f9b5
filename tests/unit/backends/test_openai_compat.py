"""How httpx's exceptions become ours, without a network."""

import inspect
import traceback
from collections.abc import Callable

import httpx
import pytest

from backends import openai_compat
from backends.base import (
    BackendError,
    BackendFailed,
    BackendProtocol,
    BackendTimeout,
    BackendTruncated,
    BackendUnavailable,
)
from backends.egress import EgressRefused
from backends.openai_compat import MEANING_OF_HTTPX, OpenAICompatible, translated
from backends.settings import BackendSettings
from backends.transport import Request
from telemetry.usage import from_openai as normalise
from tests.fakes.client import CannedAnswer, RecordingClient
from tests.fakes.requests import ask, asking


def test_every_httpx_exception_is_mapped() -> None:
    """A new class in httpx fails this test until somebody decides what it means."""
    classes = {
        value
        for value in vars(httpx).values()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert classes == set(MEANING_OF_HTTPX)


@pytest.mark.parametrize(
    ("error", "before", "inside"),
    [
        (httpx.ConnectError("x"), BackendUnavailable, BackendUnavailable),
        (EgressRefused("x"), BackendUnavailable, BackendUnavailable),
        (httpx.ConnectTimeout("x"), BackendTimeout, BackendTimeout),
        (httpx.PoolTimeout("x"), BackendTimeout, BackendTimeout),
        (httpx.ReadError("x"), BackendFailed, BackendTruncated),
        (httpx.RemoteProtocolError("x"), BackendFailed, BackendTruncated),
        (httpx.LocalProtocolError("x"), BackendProtocol, BackendProtocol),
        (httpx.StreamClosed(), BackendProtocol, BackendProtocol),
        (httpx.InvalidURL("x"), BackendProtocol, BackendProtocol),
    ],
)
def test_what_each_means(
    error: Exception, before: type[BackendError], inside: type[BackendError]
) -> None:
    """A lost connection is a failure before the answer and a cut inside it."""
    assert type(translated(error, asking(), "b", "request")) is before
    assert type(translated(error, asking(), "b", "answer")) is inside


@pytest.mark.parametrize(
    ("error", "phase"), [("ConnectTimeout", "connect"), ("ReadTimeout", "total")]
)
def test_timeouts_keep_their_phase(error: str, phase: str) -> None:
    """Of httpx's timeouts too."""
    meant = translated(getattr(httpx, error)("x"), asking(), "b", "request")
    assert isinstance(meant, BackendTimeout)
    assert meant.phase == phase


class _Quoting:
    """A client whose error quotes what it was given, as HTTP libraries do."""

    async def send(self, request: Request, *, until: float) -> CannedAnswer:
        raise httpx.LocalProtocolError("Illegal header value b'Bearer sk-secret\\n'")

    async def aclose(self) -> None:
        pass


async def test_nothing_of_the_original_is_kept() -> None:
    """httpx quotes header values and URLs: no traceback of ours prints its words."""
    settings = BackendSettings(name="up", kind="openai", base_url="https://api.example/v1")
    backend = OpenAICompatible(settings, None, _Quoting(), normalise=normalise)
    with pytest.raises(BackendError) as caught:
        await ask(backend, asking())
    assert "broke HTTP's rules" in str(caught.value)
    printed = "".join(
        line for line in traceback.format_exception(caught.value) if "raise" not in line
    )
    assert "Illegal header" not in printed


async def test_a_key_that_is_no_header_value_is_not_shown() -> None:
    """A key read from a file with its line end fails without quoting it."""

    settings = BackendSettings(name="up", kind="openai", base_url="https://api.example/v1")
    with pytest.raises(ValueError, match="line break") as caught:
        OpenAICompatible(settings, "sk-secret\n", RecordingClient(), normalise=normalise)
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("base_url", "path", "ready"),
    [
        ("https://api.example/v1", "/v1/chat/completions", "/v1/models"),
        ("https://api.example/v1/", "/v1/chat/completions", "/v1/models"),
        ("https://api.example", "/chat/completions", "/models"),
        ("https://api.example:8443/a/b/v1", "/a/b/v1/chat/completions", "/a/b/v1/models"),
    ],
)
async def test_paths(base_url: str, path: str, ready: str) -> None:
    """The surface's path is put after base_url as it is."""
    client = RecordingClient()
    settings = BackendSettings(name="up", kind="openai", base_url=base_url)
    backend = OpenAICompatible(settings, None, client, normalise=normalise)
    with pytest.raises(BackendFailed):
        await ask(backend, asking())
    assert not await backend.is_ready()
    await backend.aclose()
    assert [request.target.decode() for request in client.seen] == [path, ready]


def test_the_version_is_in_the_user_agent() -> None:
    """Upstreams can tell who asks."""
    make: Callable[[], str] = openai_compat.user_agent
    assert make().startswith("meterline/")

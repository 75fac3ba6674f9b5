"""How httpx's exceptions become ours, without a network."""

import inspect
import traceback
from collections.abc import Callable

import httpcore
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
from backends.egress import HTTPX_OF_HTTPCORE, EgressRefused
from backends.openai_compat import MEANING_OF_HTTPX, OpenAICompatible, mapping_httpx_errors
from backends.settings import BackendSettings
from telemetry.usage import from_openai as normalise
from tests.fakes.requests import ask, asking


def test_every_httpx_exception_is_mapped() -> None:
    """A new class in httpx fails this test until somebody decides what it means."""
    classes = {
        value
        for value in vars(httpx).values()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert classes == set(MEANING_OF_HTTPX)


def test_every_httpcore_exception_is_mapped() -> None:
    """The transport lets none of httpcore's through, but for one that its pool keeps inside."""
    classes = {
        value
        for value in vars(httpcore).values()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert classes - set(HTTPX_OF_HTTPCORE) == {httpcore.ConnectionNotAvailable}


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
    with pytest.raises(before), mapping_httpx_errors(asking(), backend="b", stage="request"):
        raise error
    with pytest.raises(inside), mapping_httpx_errors(asking(), backend="b", stage="answer"):
        raise error


@pytest.mark.parametrize(
    ("error", "phase"), [("ConnectTimeout", "connect"), ("ReadTimeout", "total")]
)
def test_timeouts_keep_their_phase(error: str, phase: str) -> None:
    """Of httpx's timeouts too."""
    with (
        pytest.raises(BackendTimeout) as caught,
        mapping_httpx_errors(asking(), backend="b", stage="request"),
    ):
        raise getattr(httpx, error)("x")
    assert caught.value.phase == phase


def test_nothing_of_the_original_is_kept() -> None:
    """httpx quotes header values and URLs: no traceback of ours prints its words."""
    with (
        pytest.raises(BackendError) as caught,
        mapping_httpx_errors(asking(), backend="b", stage="request"),
    ):
        raise httpx.LocalProtocolError("Illegal header value b'Bearer sk-secret\\n'")
    assert "broke HTTP's rules" in str(caught.value)
    printed = "".join(
        line for line in traceback.format_exception(caught.value) if "raise" not in line
    )
    assert "Illegal header" not in printed


async def test_a_key_that_is_no_header_value_is_not_shown() -> None:
    """A key read from a file with its line end fails without quoting it."""

    def never(_: httpx.Request) -> httpx.Response:
        raise AssertionError("not sent")

    client = httpx.AsyncClient(transport=httpx.MockTransport(never))
    settings = BackendSettings(name="up", kind="openai", base_url="https://api.example/v1")
    with pytest.raises(ValueError, match="line break") as caught:
        OpenAICompatible(settings, "sk-secret\n", client, normalise=normalise)
    assert "sk-secret" not in str(caught.value)
    await client.aclose()


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
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.path)
        return httpx.Response(500)

    backend = OpenAICompatible(
        BackendSettings(name="up", kind="openai", base_url=base_url),
        None,
        httpx.AsyncClient(transport=httpx.MockTransport(answer)),
        normalise=normalise,
    )
    with pytest.raises(BackendFailed):
        await ask(backend, asking())
    assert not await backend.is_ready()
    await backend.aclose()
    assert seen == [path, ready]


def test_the_version_is_in_the_user_agent() -> None:
    """Upstreams can tell who asks."""
    make: Callable[[], str] = openai_compat.user_agent
    assert make().startswith("meterline/")

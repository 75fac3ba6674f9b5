"""One agent framework's client, `pydantic-ai`, over all three of its model classes: a loop of tool
calls works whatever API it speaks and whatever stands behind the gateway."""

from typing import Any

import pytest
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.integration.test_surface_clients import CALLS, World, fresh, world

pytestmark = pytest.mark.asyncio(loop_scope="module")

__all__ = ["fresh", "world"]  # fixtures of the neighbour


def model_of(world: World, api: str, kind: str) -> Any:
    """The framework's model of this API, behind the gateway."""
    if api == "messages":
        return AnthropicModel(kind, provider=AnthropicProvider(anthropic_client=world.anthropic))
    provider = OpenAIProvider(openai_client=world.openai)
    if api == "chat":
        return OpenAIChatModel(kind, provider=provider)
    return OpenAIResponsesModel(kind, provider=provider)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", ["openai", "anthropic"])
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_an_agent_uses_its_tools(world: World, api: str, kind: str, stream: bool) -> None:
    """The agent asks, runs both calls, sends their results and ends with the text."""
    places: list[str] = []
    agent = Agent(model_of(world, api, kind), instructions="Be short.")

    @agent.tool_plain
    def weather(place: str) -> str:
        """The weather of a place."""
        places.append(place)
        world.says(kind, text="Fine in both.")
        return f"fine in {place}"

    world.says(kind, text="Let me look.", **CALLS[kind])
    if stream:
        async with agent.run_stream("How is it in Oslo and Rome?") as running:
            text = await running.get_output()
    else:
        text = (await agent.run("How is it in Oslo and Rome?")).output
    assert text == "Fine in both."
    assert sorted(places) == ["Oslo", "Rome"]
    turns = str(world.asked(kind)["messages"])
    assert "fine in Oslo" in turns
    assert "fine in Rome" in turns

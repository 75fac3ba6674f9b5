"""From a request body to a validated `JobRequest`, or a 400 with the path of the field.

Everything a client can send is checked here, before the engine thread sees it. Unknown fields are
ignored, as OpenAI-compatible servers do; a known field that would change the answer and is not
supported is refused, because ignoring it would be a lie.
Shapes: https://platform.openai.com/docs/api-reference/chat/create and …/completions/create;
`top_k`, `min_p`, `repetition_penalty`, `ignore_eos`, `priority`, `cache_salt`, `guided_*`,
`structured_outputs` as in vLLM.
"""

import math
import re
import secrets
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, structs

from backends.engine import guided
from backends.engine.chat import ChatTemplate, Message, ToolCall
from backends.engine.errors import RequestInvalid
from backends.engine.guided import Constraint
from backends.engine.tokenizer import Tokenizer
from backends.engine.toolcalls import MARKERS, Family
from backends.engine.tools import NamedTool, ToolBody, ToolUse, tool_use
from backends.engine.types import JobRequest, Sampling

Surface = Literal["chat", "completions"]
Unused = Any  # a field whose presence alone matters

Count = Annotated[int, Meta(ge=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
MAX_STOPS = 16
MAX_PROMPTS = 64
MAX_CHOICES = 128
_ROLES = ("system", "developer", "user", "assistant", "tool")
_PATH = re.compile(r" - at `\$\.?(.*)`$")


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class JsonSchemaFormat(Struct, frozen=True):
    name: str
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct, frozen=True):
    """As in vLLM since 0.11; one of them."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None
    structural_tag: Unused | None = None


class ContentPart(Struct, frozen=True):
    type: str
    text: str | None = None


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str


class MadeCall(Struct, frozen=True):
    function: CalledFunction
    id: str = ""
    type: str = "function"


class ChatMessage(Struct, frozen=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None


class _Body(Struct, frozen=True, kw_only=True):
    """What both surfaces take. None is as good as absent, everywhere."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None  # -1 and 0: all
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    functions: list[Unused] | None = None


class ChatBody(_Body, frozen=True, kw_only=True):
    messages: list[ChatMessage]
    tools: list[ToolBody] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class CompletionBody(_Body, frozen=True, kw_only=True):
    prompt: str | list[Any]  # texts, token ids or lists of ids: told apart in `_prompts`
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    tools: list[Unused] | None = None


class TokenizeBody(Struct, frozen=True, kw_only=True):
    """As in vLLM: a text, or messages that go through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ToolBody] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


class Tokenized(Struct, frozen=True, omit_defaults=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct, frozen=True):
    prompt: str


class Ask(Struct, frozen=True, kw_only=True):
    """A request ready for the engine, and how its answer should be sent."""

    surface: Surface
    job: JobRequest
    constraint: Constraint | None  # to be compiled into the job's guide
    stream: bool
    include_usage: bool
    logprobs: int | None
    tools: ToolUse | None = None
    echoes: tuple[str, ...] | None = None  # prompts as text, to stand before their answers
    best: int | None = None  # choices of each prompt that are shown, the likeliest; None: all


class Limits(Struct, frozen=True, kw_only=True):
    """What this engine can hold."""

    model: str
    context: int  # tokens of prompt and answer together


class Parser:
    """Bound to one model. Safe to use from any thread: tokenising a long prompt takes a while."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        limits: Limits,
        *,
        family: Family | None = None,
    ) -> None:
        """`family`: how the model writes tool calls; None: as its template says."""
        self._tokenizer = tokenizer
        self._family = family
        self._markers = frozenset(
            token for text in MARKERS if (token := tokenizer.special_token(text)) is not None
        )
        self._template = template
        self._limits = limits
        self._longest_token = max(
            len(tokenizer.token_bytes(token)) for token in range(tokenizer.size)
        )

    def chat(self, data: bytes, *, traceparent: str | None) -> Ask:
        body = _decode(data, ChatBody)
        self._check(body)
        if self._template is None:
            raise RequestInvalid("this model has no chat template: use /v1/completions")
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestInvalid("top_logprobs needs logprobs: true", param="top_logprobs")
        if None not in (body.max_tokens, body.max_completion_tokens):
            raise RequestInvalid(
                "send max_tokens or max_completion_tokens, not both", param="max_tokens"
            )
        use = tool_use(
            body.tools,
            body.tool_choice,
            is_parallel=body.parallel_tool_calls is not False,
            family=self._family or self._template.family,
        )
        return self._ask(
            "chat",
            body,
            [self._prompt_of(self._template, body.messages, use)],
            param="messages",
            use=use,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            traceparent=traceparent,
        )

    def completion(self, data: bytes, *, traceparent: str | None) -> Ask:
        body = _decode(data, CompletionBody)
        self._check(body)
        if body.tools:
            raise RequestInvalid("tools need /v1/chat/completions", param="tools")
        if body.suffix:
            raise RequestInvalid("suffix is not supported by this engine", param="suffix")
        wanted = body.n or 1
        if body.best_of is not None and body.best_of < wanted:
            raise RequestInvalid("best_of is at least n", param="best_of")
        is_choosy = body.best_of is not None and body.best_of > wanted
        if is_choosy and body.stream:
            raise RequestInvalid("the best are known at the end: do not stream", param="best_of")
        prompts = self._prompts(body.prompt)
        ask = self._ask(
            "completions",
            structs.replace(body, n=body.best_of or wanted),
            [self._prompt(prompt) for prompt in prompts],
            param="prompt",
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            traceparent=traceparent,
        )
        if body.echo:
            scored = structs.replace(ask.job.sampling, prompt_logprobs=body.logprobs)
            ask = structs.replace(
                ask,
                echoes=tuple(map(self._echo, prompts)),
                job=structs.replace(ask.job, sampling=scored),
            )
        if is_choosy:
            ranked = structs.replace(ask.job.sampling, logprobs=body.logprobs or 0)
            ask = structs.replace(ask, best=wanted, job=structs.replace(ask.job, sampling=ranked))
        return ask

    def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def tokenize(self, data: bytes) -> Tokenized:
        """The tokens that a request with this text or these messages would begin with."""
        body = _decode(data, TokenizeBody)
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestInvalid("send prompt or messages, one of them", param="prompt")
        if body.messages is not None:
            tokens = self._chat_tokens(body.messages, body.tools)
        else:
            assert body.prompt is not None
            self._refuse_absurd(len(body.prompt), "prompt")
            tokens = self._tokenizer.encode(body.prompt)
            if body.add_special_tokens is not False and self._tokenizer.bos is not None:
                tokens = [self._tokenizer.bos, *tokens]
        words = None
        if body.return_token_strs:
            words = [self._tokenizer.token_bytes(t).decode("utf-8", "replace") for t in tokens]
        return Tokenized(len(tokens), self._limits.context, tokens, words)

    def detokenize(self, data: bytes) -> Detokenized:
        """The text of tokens, special ones included. Half characters become U+FFFD."""
        body = _decode(data, DetokenizeBody)
        self._check_model(body.model)
        if len(body.tokens) > self._limits.context:
            raise _too_long(f"at most {self._limits.context} tokens", "tokens")
        if not all(0 <= token < self._tokenizer.size for token in body.tokens):
            raise RequestInvalid(
                f"token ids are whole numbers from 0 to {self._tokenizer.size - 1}", param="tokens"
            )
        data = b"".join(map(self._tokenizer.token_bytes, body.tokens))
        return Detokenized(data.decode("utf-8", "replace"))

    def _chat_tokens(self, messages: list[ChatMessage], tools: list[ToolBody] | None) -> list[int]:
        if self._template is None:
            raise RequestInvalid("this model has no chat template", param="messages")
        use = tool_use(tools, None, is_parallel=True, family=self._template.family)
        return self._prompt_of(self._template, messages, use)

    def _prompt_of(
        self, template: ChatTemplate, given: list[ChatMessage], use: ToolUse | None
    ) -> list[int]:
        messages = _messages(given)
        offered = use.tools if use else ()
        calls = [call for message in given for call in message.tool_calls or ()]
        self._refuse_absurd(
            sum(len(message.content) for message in messages)
            + sum(len(call.function.arguments) for call in calls)
            + len(_json(offered)),
            "messages",
        )
        return template.encode(messages, offered)

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._limits.model:
            raise RequestInvalid(
                f"model `{model}` is not served here; this is `{self._limits.model}`",
                param="model",
                code="model_not_found",
                status=404,
            )

    def _check(self, body: _Body) -> None:
        self._check_model(body.model)
        if body.functions:
            raise RequestInvalid("functions were replaced by tools: send those", param="functions")
        if body.stream_options is not None and not body.stream:
            raise RequestInvalid("stream_options needs stream: true", param="stream_options")
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"):
            value = getattr(body, name)
            if value is not None and not math.isfinite(value):
                raise RequestInvalid(f"{name} is not a finite number", param=name)

    def _ask(
        self,
        surface: Surface,
        body: _Body,
        prompts: list[list[int]],
        *,
        param: str,
        use: ToolUse | None = None,
        max_tokens: int | None,
        logprobs: int | None,
        traceparent: str | None,
    ) -> Ask:
        if len(prompts) * (body.n or 1) > MAX_CHOICES:
            raise RequestInvalid(f"prompts × n is at most {MAX_CHOICES}", param="n")
        options = body.stream_options or StreamOptions()
        constraint = _constraint(body)
        if use is not None:
            if constraint is not None:
                raise RequestInvalid(
                    f"with {constraint.param} no tool can be called: send tool_choice none",
                    param="tools",
                )
            constraint = use.constraint
        if constraint is not None and body.ignore_eos:
            raise RequestInvalid("an answer that must end cannot ignore_eos", param="ignore_eos")
        return Ask(
            surface=surface,
            constraint=constraint,
            job=JobRequest(
                prompts=tuple(tuple(prompt) for prompt in prompts),
                n=body.n or 1,
                sampling=self._sampling(body, logprobs, is_guided=constraint is not None),
                max_tokens=tuple(self._room(len(p), max_tokens, param) for p in prompts),
                stop=_stops(body.stop),
                ignore_eos=bool(body.ignore_eos),
                seed=secrets.randbits(63) if body.seed is None else body.seed,
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
                traceparent=traceparent,
                model=body.model,
                shown=self._markers if use else frozenset(),
            ),
            stream=bool(body.stream),
            include_usage=bool(options.include_usage),
            logprobs=logprobs,
            tools=use,
        )

    def _sampling(self, body: _Body, logprobs: int | None, *, is_guided: bool) -> Sampling:
        return Sampling(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(0, body.top_k or 0),
            min_p=body.min_p or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            logit_bias=self._biases(body.logit_bias or {}),
            logprobs=logprobs,
            is_guided=is_guided,
        )

    def _biases(self, biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
        result: dict[int, float] = {}
        for key, bias in biases.items():
            token = int(key) if re.fullmatch(r"[0-9]{1,9}", key) else -1
            if not 0 <= token < self._tokenizer.size:
                raise RequestInvalid(
                    f"`{key[:40]}` is no token of this model: ids are 0 to "
                    f"{self._tokenizer.size - 1}",
                    param="logit_bias",
                )
            if token in result:
                raise RequestInvalid(f"token {token} is there twice", param="logit_bias")
            result[token] = bias
        return tuple(sorted(result.items()))

    def _room(self, prompt_tokens: int, asked: int | None, param: str) -> int:
        context = self._limits.context
        if prompt_tokens == 0:
            raise RequestInvalid("there is nothing to continue: the prompt is empty", param=param)
        if prompt_tokens >= context:
            raise _too_long(
                f"the prompt has {prompt_tokens} tokens and this model's context holds {context}, "
                "the answer included: shorten it",
                param,
            )
        if asked is not None and prompt_tokens + asked > context:
            raise _too_long(
                f"the prompt has {prompt_tokens} tokens and asks for {asked} more; this model's "
                f"context holds {context}: lower max_tokens to {context - prompt_tokens}",
                param,
            )
        return context - prompt_tokens if asked is None else asked

    def _refuse_absurd(self, characters: int, param: str) -> None:
        """Without tokenising: so many characters cannot fit, whatever they are."""
        if characters > self._limits.context * self._longest_token:
            raise _too_long(
                f"the prompt has {characters} characters and cannot fit into this model's context "
                f"of {self._limits.context} tokens: shorten it",
                param,
            )

    def _prompts(self, prompt: str | list[Any]) -> list[str | list[int]]:
        """One of the four shapes: a text, texts, token ids, lists of token ids."""
        match prompt:
            case str():
                prompts: list[Any] = [prompt]
            case [int(), *_]:
                prompts = [prompt]
            case [str() | list(), *_]:
                prompts = prompt
            case _:
                raise RequestInvalid(
                    "prompt is a text, a list of texts, or token ids, and not empty",
                    param="prompt",
                )
        if len(prompts) > MAX_PROMPTS:
            raise RequestInvalid(f"more than {MAX_PROMPTS} prompts in one request", param="prompt")
        return prompts

    def _prompt(self, prompt: str | list[int]) -> list[int]:
        bos = [] if self._tokenizer.bos is None else [self._tokenizer.bos]
        match prompt:
            case str():
                self._refuse_absurd(len(prompt), "prompt")
                tokens = self._tokenizer.encode(prompt)
                return bos + tokens if tokens else []
            case list():
                for token in prompt:
                    is_id = isinstance(token, int) and not isinstance(token, bool)
                    if not is_id or not 0 <= token < self._tokenizer.size:
                        raise RequestInvalid(
                            f"token ids are whole numbers from 0 to {self._tokenizer.size - 1}",
                            param="prompt",
                        )
                return prompt
            case _:
                raise RequestInvalid(
                    "prompts of one request are all texts or all token ids", param="prompt"
                )


def _decode(data: bytes, shape: type[Any]) -> Any:
    try:
        return msgspec.json.decode(data, type=shape)
    except msgspec.ValidationError as error:
        message = str(error)
        path = _PATH.search(message)
        missing = re.search(r"missing required field `(\w+)`", message)
        param = path[1] if path else ""
        if missing:
            param = f"{param}.{missing[1]}" if param else missing[1]
        raise RequestInvalid(_PATH.sub("", message), param=param or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestInvalid(f"the body is not JSON: {error}") from error


def _messages(messages: list[ChatMessage]) -> list[Message]:
    if not messages:
        raise RequestInvalid("there is nothing to answer: messages is empty", param="messages")
    result = []
    for i, message in enumerate(messages):
        if message.role not in _ROLES:
            raise RequestInvalid(
                f"role `{message.role[:40]}` is none of {', '.join(_ROLES)}",
                param=f"messages[{i}].role",
            )
        role = "system" if message.role == "developer" else message.role
        calls = tuple(
            _made_call(call, f"messages[{i}].tool_calls[{j}]")
            for j, call in enumerate(message.tool_calls or ())
        )
        if calls and role != "assistant":
            raise RequestInvalid(
                "only the assistant calls tools", param=f"messages[{i}].tool_calls"
            )
        result.append(
            Message(role, _content(message, i), calls, message.tool_call_id, message.name)
        )
    return result


def _made_call(call: MadeCall, param: str) -> ToolCall:
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise RequestInvalid(
            "arguments are a JSON object, as text", param=f"{param}.function.arguments"
        ) from None
    return ToolCall(id=call.id, name=call.function.name, arguments=arguments)


def _content(message: ChatMessage, i: int) -> str:
    match message.content:
        case str(text):
            return text
        case None:
            if message.role == "assistant":
                return ""
            raise RequestInvalid("content is missing", param=f"messages[{i}].content")
        case parts:
            texts = []
            for j, part in enumerate(parts):
                if part.type != "text" or part.text is None:
                    raise RequestInvalid(
                        f"content of type `{part.type[:40]}` is not supported: this model reads "
                        "text",
                        param=f"messages[{i}].content[{j}]",
                    )
                texts.append(part.text)
            return "".join(texts)


def _constraint(body: _Body) -> Constraint | None:
    """What the answer must match, from the one field that says so."""
    found: list[Constraint] = []
    if body.response_format is not None:
        found += _formatted(body.response_format)
    older = StructuredOutputs(
        body.guided_json, body.guided_regex, body.guided_grammar, body.guided_choice
    )
    found += _structured(older, "guided_")
    if body.structured_outputs is not None:
        found += _structured(body.structured_outputs, "structured_outputs.")
    if len(found) > 1:
        raise RequestInvalid(
            f"{found[0].param} and {found[1].param} exclude each other", param=found[1].param
        )
    return found[0] if found else None


def _structured(wanted: StructuredOutputs, prefix: str) -> list[Constraint]:
    found = []
    if wanted.json is not None:
        text = wanted.json if isinstance(wanted.json, str) else _json(wanted.json)
        found.append(Constraint("json", text, f"{prefix}json"))
    if wanted.json_object:
        found.append(Constraint("json", '{"type": "object"}', f"{prefix}json_object"))
    if wanted.regex is not None:
        found.append(Constraint("regex", wanted.regex, f"{prefix}regex"))
    if wanted.grammar is not None:
        found.append(Constraint("grammar", wanted.grammar, f"{prefix}grammar"))
    if wanted.choice is not None:
        if not all(wanted.choice) or not wanted.choice:
            raise RequestInvalid("texts to choose from are not empty", param=f"{prefix}choice")
        found.append(guided.choice(wanted.choice, f"{prefix}choice"))
    if wanted.structural_tag is not None:
        raise RequestInvalid("not supported by this engine", param=f"{prefix}structural_tag")
    return found


def _formatted(wanted: ResponseFormat) -> list[Constraint]:
    match wanted.type, wanted.json_schema:
        case "text", _:
            return []
        case "json_object", _:
            return [Constraint("json", '{"type": "object"}', "response_format")]
        case "json_schema", None:
            raise RequestInvalid("json_schema is missing", param="response_format.json_schema")
        case "json_schema", JsonSchemaFormat(schema=schema):
            param = "response_format.json_schema.schema"
            return [Constraint("json", _json(schema or {}), param)]
        case _:
            raise RequestInvalid(
                f"response_format `{wanted.type[:40]}` is none of text, json_object, json_schema",
                param="response_format.type",
            )


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise RequestInvalid(f"at most {MAX_STOPS} stop strings", param="stop")
    for text in stops:
        if not 0 < len(text) <= 1_000:
            raise RequestInvalid("a stop string has 1 to 1,000 characters", param="stop")
    return tuple(stops)


def _too_long(message: str, param: str) -> RequestInvalid:
    return RequestInvalid(message, param=param, code="context_length_exceeded")

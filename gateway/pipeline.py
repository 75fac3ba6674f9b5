"""One request, top to bottom: the whole product on one screen. The stages do not know each other;
only this file knows their order."""

import random
from collections.abc import Callable, Sequence
from functools import partial

from backends.base import ChatRequest, Previous, Timeouts
from gateway.answer import Answer, settling
from gateway.auth import Auth, Caller
from gateway.call import Asked, Call
from gateway.client_timeouts import client_timeout_s
from gateway.dispatch import first_success
from gateway.errors import (
    BadRequest,
    Downgrades,
    Draining,
    LedgerUnavailable,
    ModelUnknown,
    Unauthenticated,
)
from gateway.health import Health
from gateway.limits import Limits
from gateway.refusals import Refusals
from gateway.responses import ResponseStore
from gateway.routing import Route, Target, always, capable, plan
from gateway.runtime import Runtime, RuntimeHolder
from gateway.stopping import ask_to_stop
from telemetry import trace_context
from telemetry.ledger import Ledger, OpenRecord, WalUnavailable
from telemetry.record import Attempt

DEGRADED = "x-meterline-degraded"
CHEAPER = "cheaper-model;budget"  # rung; reason
GROWING = ("chat", "completions", "messages", "responses")  # whose answers may be long


class Gateway:
    """The stages in their order, and the objects that they act through."""

    def __init__(
        self,
        *,
        runtimes: RuntimeHolder,
        auth: Auth,
        limits: Limits,
        ledger: Ledger,
        refusals: Refusals,
        responses: ResponseStore,
    ) -> None:
        self.runtimes = runtimes
        self.auth = auth
        self.limits = limits
        self.ledger = ledger
        self.refusals = refusals
        self.responses = responses
        self.draining = False
        self._dice = random.Random()  # noqa: S311  (weights, not secrets)

    async def complete(self, call: Call) -> Answer:
        """Answer one completion. From `open` on exactly one record is settled, whatever happens.

        Returns when the first content exists; raises a GatewayError before that."""
        runtime = self.runtimes.current  # one snapshot for the whole request
        health = self.runtimes.health
        record = self.ledger.open(
            request_id=call.request_id,
            surface=call.surface,
            trace=trace_context.read(call.traceparent, sample_root=self._sampled(runtime)),
            deadline_s=runtime.config.server.request_timeout_s,
            client_request_id=call.client_request_id,
        )
        with settling(record, call):
            with record.stage("auth"):
                caller = await self._identify(call, record)
            if self.draining:
                raise Draining("This replica is shutting down. Retry: another one will answer.")
            with record.stage("route"):
                asked = call.parse()
                self._asked(record, asked)
                _heed_client_timeout(call, asked, record)
                route = runtime.route(asked.model, caller)
                previous = await self._previous(caller, asked)
                asked = asked.going_on_from(previous)
                record.data.input_estimate = asked.input_estimate
                usable = _usable(runtime, health)
                targets = plan(_capable(route, asked), self._dice.random(), usable)
            with record.stage("admit"):
                try:
                    await self.limits.admit(call, caller, asked, targets)
                except Downgrades as spent:
                    route = self._cheaper(call, caller, route, spent, runtime)
                    targets = plan(_capable(route, asked), self._dice.random(), usable)
                    record.data.degraded = call.answer_headers[DEGRADED] = CHEAPER
                    await self.limits.admit(call, caller, asked, targets, is_downgraded=True)
                self._intend(record)  # in the log before anything is spent
            call.presence.ask_to_stop = partial(ask_to_stop, record, runtime.upstreams)
            hedge = None
            if route.hedge is not None and asked.stream:
                hedge = self.runtimes.hedges.of(route.model, route.hedge)
            live = await first_success(
                targets,
                runtime.upstreams,
                lambda target, attempt, timeouts: _request(
                    call, asked, record, runtime, previous, target, attempt, timeouts
                ),
                record,
                health,
                attempts=route.attempts,
                dice=self._dice.random,
                hedge=hedge,
            )
        growth = self.limits.growth(call.request_id) if call.surface in GROWING else None
        return Answer(call, asked, live, record, previous, growth)

    async def remember(self, answer: Answer, response: bytes) -> None:
        """Keep a complete answer that its client may go on from. It is settled already."""
        tenant_id, backend = answer.record.data.tenant_id, answer.backend
        upstream = self.runtimes.current.upstreams.get(backend)
        knows_it = upstream is not None and "responses" in upstream.dialect.speaks
        if tenant_id is not None:
            await self.responses.keep(
                tenant_id,
                body=answer.call.body,
                previous=answer.previous,
                backend=backend if knows_it else None,
                response=response,
            )

    async def _previous(self, caller: Caller, asked: Asked) -> Previous | None:
        if asked.previous is None:
            return None
        return await self.responses.recall(caller.tenant_id, asked.previous)

    def _sampled(self, runtime: Runtime) -> bool:
        share = runtime.config.telemetry.sampling
        return share >= 1.0 or self._dice.random() < share

    async def _identify(self, call: Call, record: OpenRecord) -> Caller:
        try:
            caller = await self.auth.identify(call.credential())
        except Unauthenticated as error:
            self.refusals.count(error)
            record.is_logged = self.refusals.may_record()
            raise
        record.data.tenant_id = caller.tenant_id
        record.data.key_id = caller.key_id
        caller.require(call.surface)
        return caller

    @staticmethod
    def _cheaper(
        call: Call, caller: Caller, route: Route, spent: Downgrades, runtime: Runtime
    ) -> Route:
        """The route that a spent budget goes on with. Raises `spent` if there is none that this
        caller may use, or if it wants no other."""
        to = spent.to or route.cheaper
        if to is None or to == route.model or not call.may_degrade():
            raise spent
        try:
            return runtime.route(to, caller)
        except ModelUnknown:
            raise spent from None

    @staticmethod
    def _intend(record: OpenRecord) -> None:
        try:
            record.intend()
        except WalUnavailable as error:
            raise LedgerUnavailable(
                "The ledger cannot record this request, so it is not served. Retry shortly."
            ) from error

    @staticmethod
    def _asked(record: OpenRecord, asked: Asked) -> None:
        record.data.asked_model = asked.model
        record.data.stream = asked.stream
        record.data.input_estimate = asked.input_estimate
        record.data.output_limit = asked.output_limit


# Where a need comes from, if not from the field of its name.
_PARAMS = {
    "json_schema": "response_format",
    "json_object": "response_format",
    "embeddings": "model",
    "completions": "model",
}


def _heed_client_timeout(call: Call, asked: Asked, record: OpenRecord) -> None:
    """Nothing is computed for a client that has given up: its own time-out ends all attempts."""
    timeout_s = client_timeout_s(call.headers, stream=asked.stream)
    if timeout_s is not None:
        data = record.data
        data.deadline_ns = min(data.deadline_ns, data.opened_ns + round(timeout_s * 1e9))


def _usable(runtime: Runtime, health: Health) -> Callable[[Target], bool]:
    """Whether a target may be asked now: one of its servers, with one of our keys."""
    if health.is_calm:
        return always
    return lambda target: runtime.upstreams[target.backend].is_usable(target, health)


def _capable(route: Route, asked: Asked) -> Sequence[Target]:
    """The targets that can do what is asked. Raises BadRequest if none can."""
    targets = capable(route.targets, asked.needs)
    if not targets:
        need = min(asked.needs)
        raise BadRequest(
            f"No backend of the model '{route.model}' supports all that this request needs: "
            f"{', '.join(sorted(asked.needs))}.",
            param=_PARAMS.get(need, need),
            code="unsupported_parameter",
        )
    return targets


def _request(
    call: Call,
    asked: Asked,
    record: OpenRecord,
    runtime: Runtime,
    previous: Previous | None,
    target: Target,
    attempt: Attempt,
    timeouts: Timeouts,
) -> ChatRequest:
    data = record.data
    return ChatRequest(
        surface=call.surface,
        model=target.model,
        body=call.body,
        stream=asked.stream,
        timeouts=timeouts,
        request_id=data.request_id,
        traceparent=trace_context.write(data.trace_id, attempt.span_id, sampled=data.sampled),
        cache_salt=runtime.salt(data.tenant_id),
        created_s=record.now_ns() // 1_000_000_000,
        vendor_headers=call.vendor_headers,
        previous=previous,
    )

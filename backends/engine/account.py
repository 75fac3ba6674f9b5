"""Where the engine's time went and whom it is charged to: integer microseconds, nothing lost.

The wall time since the start is cut at marks into load, warm-up, steps and idle; their sum is the
wall time exactly. The time of each step is split over its sequences by the work they caused
(formula of `shares`), and the parts sum to the step exactly.

The split is in the core of the cost game: no group of sequences pays more than the step would
have cost for that group alone, as modelled. Each pays its own compute and attention, and an equal
share of the weight stream that compute did not hide. It is not the Shapley value.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from msgspec import Struct

from backends.engine.types import ModelFacts, Row
from telemetry.clock import Clock
from telemetry.money import split

WallPhase = Literal["load", "warmup", "prefill", "decode", "mixed", "idle"]


class StepClock:
    """Cuts wall time. Each `mark` gives all time since the last one to one phase."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._origin_ns = clock.monotonic_ns()
        self._marked_us = 0
        self._by_phase: dict[WallPhase, int] = {
            "load": 0, "warmup": 0, "prefill": 0, "decode": 0, "mixed": 0, "idle": 0,
        }  # fmt: skip

    @property
    def wall_us(self) -> int:
        """From the start to the last mark: the sum over the phases, always."""
        return self._marked_us

    @property
    def by_phase_us(self) -> Mapping[WallPhase, int]:
        return MappingProxyType(self._by_phase)

    def mark(self, phase: WallPhase) -> int:
        """Microseconds since the last mark, now counted under `phase`."""
        # Rounded from the origin, never step by step: the fractions do not get lost.
        now_us = (self._clock.monotonic_ns() - self._origin_ns) // 1_000
        elapsed = now_us - self._marked_us
        self._by_phase[phase] += elapsed
        self._marked_us = now_us
        return elapsed


class CostModel(Struct, frozen=True, kw_only=True):
    """Seconds, of one model on one machine. Letters as in `shares`."""

    body_stream_s: float  # A: read the body's weights once
    head_stream_s: float  # A_h
    body_token_s: float  # phi: compute one token in the body
    head_row_s: float  # phi_h: one row of logits
    kv_token_s: float  # kappa: read one token's keys and values
    attended_pair_s: float  # psi: one query token against one key token
    sample_row_s: float  # sigma
    step_s: float  # o: what any step costs


class Work(Struct, frozen=True):
    """What one sequence does in one step."""

    tokens: int  # q
    context: int  # c, after the step
    logits_rows: int  # l

    @property
    def attended_pairs(self) -> int:
        return self.tokens * (self.context - self.tokens) + self.tokens * (self.tokens + 1) // 2


class Share(Struct, frozen=True):
    """Modelled seconds of one sequence in one step: the model's and the sampler's."""

    model_s: float
    sampling_s: float


def shares(work: Sequence[Work], model: CostModel) -> list[Share]:
    """m_i = phi q_i + max(0, A - sum phi q)/n + max(kappa c_i, psi a_i)
    + [l_i > 0](phi_h l_i + max(0, A_h - sum phi_h l)/n_l) + sigma l_i + o/n."""
    n = len(work)
    n_logits = sum(item.logits_rows > 0 for item in work) or 1
    body_s = sum(item.tokens for item in work) * model.body_token_s
    head_s = sum(item.logits_rows for item in work) * model.head_row_s
    body_rest_s = max(0.0, model.body_stream_s - body_s) / n
    head_rest_s = max(0.0, model.head_stream_s - head_s) / n_logits
    result = []
    for item in work:
        model_s = item.tokens * model.body_token_s + body_rest_s + model.step_s / n
        model_s += max(item.context * model.kv_token_s, item.attended_pairs * model.attended_pair_s)
        if item.logits_rows:
            model_s += item.logits_rows * model.head_row_s + head_rest_s
        result.append(Share(model_s, item.logits_rows * model.sample_row_s))
    return result


def stand_alone_s(work: Sequence[Work], model: CostModel) -> float:
    """C(G): the modelled time of a step with these sequences and no others."""
    if not work:
        return 0.0
    body_s = sum(item.tokens for item in work) * model.body_token_s
    rows = sum(item.logits_rows for item in work)
    cost = model.step_s + max(model.body_stream_s, body_s) + rows * model.sample_row_s
    for item in work:
        cost += max(item.context * model.kv_token_s, item.attended_pairs * model.attended_pair_s)
    if rows:
        cost += max(model.head_stream_s, rows * model.head_row_s)
    return cost


def charge(
    step_us: int, rows: Sequence[Row], model: CostModel, rejected: Sequence[int]
) -> list[dict[str, int]]:
    """Microseconds by phase (prefill, decode, recompute, spec_rejected, sampling) for each row;
    their sum is `step_us`. `rejected`: how many of each row's drafts did not come true. Weights
    are modelled picoseconds, so that the split is done in integers."""
    work = [Work(row.count, row.context, row.logits_rows) for row in rows]
    weights: list[int] = []
    for row, item, share, wrong in zip(rows, work, shares(work, model), rejected, strict=True):
        wasted_s = min(share.model_s, wasted(item, wrong, model))
        wasted_s += row.drafting_s * wrong / max(1, len(row.drafts))
        parts_s = (share.model_s + row.drafting_s - wasted_s, wasted_s, share.sampling_s)
        weights += [round(seconds * 1e12) for seconds in parts_s]
    parts = split(step_us, weights)
    result = []
    for i, row in enumerate(rows):
        kept, wasted_us, sampling = parts[3 * i : 3 * i + 3]
        result.append({row.phase: kept, "sampling": sampling})
        if wasted_us:
            result[-1]["spec_rejected"] = wasted_us
    return result


def wasted(work: Work, rejected: int, model: CostModel) -> float:
    """Modelled seconds of a sequence's own work that went into drafts that did not come true."""
    own_s = work.tokens * model.body_token_s
    own_s += max(work.context * model.kv_token_s, work.attended_pairs * model.attended_pair_s)
    return own_s * rejected / work.tokens + rejected * model.head_row_s


def prompt_room(decodes: int, model: CostModel, target_s: float) -> int:
    """Prompt tokens that a step of so many decodes can take on and still end within the target."""
    rows_s = model.head_row_s + model.sample_row_s
    fixed_s = model.step_s + max(model.head_stream_s, decodes * rows_s)
    body_s = target_s - fixed_s
    return max(0, int(body_s / model.body_token_s) - decodes)


def draft_price(decodes: int, model: CostModel) -> float:
    """What checking one draft costs, as a part of what a step of so many decodes costs each."""
    step_s = model.step_s + max(model.body_stream_s, decodes * model.body_token_s)
    step_s += max(model.head_stream_s, decodes * model.head_row_s) + decodes * model.sample_row_s
    # While compute hides behind the weight stream, a draft still takes sampling and attention.
    extra_s = model.body_token_s + model.head_row_s + model.sample_row_s
    return min(1.0, extra_s * decodes / step_s)


def drafting_price(decodes: int, draft: CostModel, model: CostModel) -> float:
    """What one guess of a second model costs each, as a part of a step of so many decodes."""
    work = [Work(1, 1, 1)] * decodes
    return stand_alone_s(work, draft) / stand_alone_s(work, model)


def wall_phase(rows: Sequence[Row]) -> WallPhase:
    """What kind of step it was."""
    decodes = sum(row.phase == "decode" for row in rows)
    if decodes == len(rows):
        return "decode"
    return "mixed" if decodes else "prefill"


def calibrate(
    facts: ModelFacts, *, one_token_s: float, many_tokens_s: float, many: int, sampling_s: float
) -> CostModel:
    """The constants from two measured steps: of one token, which streams the weights once, and of
    `many` prompt tokens, which compute. Bandwidth and FLOP/s follow; the rest is counted."""
    params = facts.body_params + facts.head_params
    step_s = 0.05 * one_token_s  # what is neither weights nor attention; small, so a guess will do
    stream_s = one_token_s - step_s
    byte_s = stream_s / (params * facts.weight_bytes)
    token_s = min(many_tokens_s / many, stream_s)
    flop_s = token_s / (2 * facts.body_params)
    return CostModel(
        body_stream_s=stream_s * facts.body_params / params,
        head_stream_s=stream_s * facts.head_params / params,
        body_token_s=token_s,
        head_row_s=2 * facts.head_params * flop_s,
        kv_token_s=facts.kv_token_bytes * byte_s,
        attended_pair_s=4 * facts.layers * facts.heads * facts.head_dim * flop_s,
        sample_row_s=sampling_s,
        step_s=step_s,
    )

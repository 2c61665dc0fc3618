"""A step while it is being decided: :class:`StepPlan`, from "this request gets so many tokens" to a batch.

The scheduler decides who takes part, with which blocks and row; the plan writes down what that means for the device:
entries with their input ids, the state of rows that are new, what each sample needs, and which log-probs the step
gives. It knows the room that is left. Lives for one call of ``Scheduler.schedule``, in the engine's thread.
"""

from dataclasses import dataclass, field

from gapless.engine.request import Request
from gapless.engine.wide_rows import KnownTokens, WideRows
from gapless.pipeline.batch import BatchBuilder, BatchEntry, MaskedToken, RowInit, ScheduledBatch, TableChange
from gapless.pipeline.logprobs import LogprobLimits, PromptSpan
from gapless.pipeline.padding import StepBuckets
from gapless.pipeline.wide_rows import WideLimits

__all__ = ["SchedulerLimits", "StepPlan"]

_LARGEST_FP32 = 3.4e38
_LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """Resolved sizes.

    Attributes:
        max_rows: most requests on the device at once.
        token_budget: most tokens in a step.
        chunk_size: most tokens of one request in a step.
        block_size: tokens in a KV block.
        max_changes: most block-table changes in a step, which its buffers have room for.
        prefix_caching: whether full blocks are kept for later requests.
        buckets: sizes to which steps are padded; ``None`` for none.
        wide: what there is for penalties, biases and bad words.
        logprobs: how many log-probs a step may give.
    """

    max_rows: int
    token_budget: int
    chunk_size: int
    block_size: int
    max_changes: int
    prefix_caching: bool
    buckets: StepBuckets | None = None
    wide: WideLimits = field(default_factory=WideLimits)
    logprobs: LogprobLimits = field(default_factory=LogprobLimits)


class StepPlan:
    """What one step will hold.

    Args:
        step: its number.
        limits: how much it may hold.
        wide_rows: places for penalties, biases and bad words; entering takes one.

    Attributes:
        budget: tokens that there is room for.
        short: a running request found no block, so nobody is admitted.
        requests: those that take part, in the order of their entries.
    """

    __slots__ = ("_builder", "_limits", "_wide_rows", "budget", "requests", "short", "step")

    def __init__(self, step: int, limits: SchedulerLimits, wide_rows: WideRows) -> None:
        self.step = step
        self.budget = limits.token_budget
        self.short = False
        self.requests: list[Request] = []
        self._limits = limits
        self._wide_rows = wide_rows
        self._builder = BatchBuilder(step)

    def chunk(self, request: Request, todo: int) -> int:
        """How many of ``todo`` tokens the step has room for; the output has room for so many prompt log-probs."""
        most = min(todo, self.budget, self._limits.chunk_size)
        if request.num_rated_tokens < request.num_prompt_tokens:
            room = self._limits.logprobs.max_prompt_tokens - self._builder.logprobs.num_prompt_tokens
            most = min(most, max(request.num_rated_tokens - 1 - request.num_computed_tokens, 0) + room)
        return most

    def can_admit(self, request: Request, num_blocks: int) -> bool:
        """Whether the step's buffers have room for a new row with ``num_blocks`` blocks and what else it brings."""
        # The buffers have room for any one request, so the first always fits.
        if self.requests and len(self._builder.table_changes) + num_blocks > self._limits.max_changes:
            return False
        wide = request.wide
        return wide is None or self._wide_rows.fits(wide, request.num_known_tokens, self._builder.wide)

    def admit(self, request: Request) -> None:
        """Send the state of a request that has got its row, and its cached blocks, with the step."""
        for column, block in enumerate(request.blocks):
            self._builder.table_changes.append(TableChange(request.row, column, block))
        if request.wide is not None:
            known = KnownTokens(prompt=request.prompt, output=request.output)
            request.wide_row = self._wide_rows.enter(request.wide, known, self._builder.wide)
        params = request.params
        if not params.greedy:
            self._builder.row_inits.append(
                RowInit(
                    row=request.row,
                    # Device state is fp32 and int32; what does not fit there means the same as the limit.
                    temperature=min(params.temperature, _LARGEST_FP32),
                    top_k=min(max(params.top_k, 0), _LARGEST_INT32),
                    top_p=params.top_p,
                    min_p=params.min_p,
                    seed=request.seed,
                )
            )

    def add_block(self, request: Request, block: int) -> None:
        """Append a block to a request's table, from this step on."""
        self._builder.table_changes.append(TableChange(request.row, len(request.blocks), block))
        request.blocks.append(block)

    def add(self, request: Request, num_tokens: int, todo: int) -> BatchEntry:
        """Add an entry of ``num_tokens`` of the ``todo`` tokens that a request has to compute."""
        start = request.num_computed_tokens
        end = start + num_tokens
        final = num_tokens == todo
        samples = final and request.max_tokens > 0
        carries = samples and request.in_flight > 0
        position = len(request.output) + request.in_flight
        entry = BatchEntry(
            request.id, request.residency, request.row, start, num_tokens, final, samples, carries, position
        )
        builder, params = self._builder, request.params
        # Most samples are greedy and need nothing, and this runs for every row of every step.
        if samples and (
            params.temperature
            or params.min_tokens > position
            or request.wide is not None
            or request.logprobs is not None
        ):
            self._sample(request, position)
        if request.num_rated_tokens < request.num_prompt_tokens:
            self._rate_prompt(request, start, end)
        if num_tokens > 1:
            # Several tokens to do means still prefilling, and then none is in flight: all ids are known.
            builder.add_chunk(entry, request.known_ids(start, end))
        elif carries:
            builder.add_token(entry, 0)
        else:
            offset = start - request.num_prompt_tokens
            builder.add_token(entry, request.output[offset] if offset >= 0 else int(request.prompt[start]))
        self.requests.append(request)
        self.budget -= num_tokens
        return entry

    def build(self) -> ScheduledBatch:
        """Make the batch."""
        batch, buckets = self._builder.build(), self._limits.buckets
        return batch if buckets is None else buckets.pad(batch)

    def _sample(self, request: Request, position: int) -> None:
        """What the next sample needs, which is this request's token at ``position`` of its output."""
        builder, params = self._builder, request.params
        sample = builder.num_samples
        if not params.greedy:
            builder.random_samples.append(sample)
            if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
                builder.needs_filter = True
        if position < params.min_tokens:
            builder.masked_tokens.extend(MaskedToken(sample, token) for token in request.stop_token_ids)
        if request.wide is not None:
            self._wide_rows.sample(request.wide, request.wide_row, sample, builder.wide)
        if request.logprobs is not None:
            builder.logprobs.add_sample(sample, params.logprobs or 0, self._limits.logprobs.max_top)

    def _rate_prompt(self, request: Request, start: int, end: int) -> None:
        """Ask for the log-probs of the prompt tokens that follow on the positions ``[start, end)``."""
        first = max(start + 1, request.num_rated_tokens)
        after = min(end + 1, request.num_prompt_tokens)
        if after <= first:
            return
        top = min(request.params.prompt_logprobs or 0, self._limits.logprobs.max_top)
        # Tokens of the step so far, which this entry's follow.
        before = self._limits.token_budget - self.budget
        self._builder.logprobs.add_prompt(
            PromptSpan(request.id, first, after - first), request.prompt[first:after], before + first - 1 - start, top
        )
        request.num_rated_tokens = after

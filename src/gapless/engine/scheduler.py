"""What the next step will run: :class:`Scheduler`, continuous batching with a token budget over paged KV.

Decodes first, then prefill chunks of running requests, then admission by arrival without overtaking. The scheduler
owns every request, its blocks and its row, and decides who takes part in a step; a
:class:`~gapless.engine.step_plan.StepPlan` makes the batch of it, and the ring sees nothing else. It works ahead of the
device: a request's ``num_computed_tokens`` counts what is enqueued, and its in-flight tokens are counted, never read.

What it relies on: counts are always known (the values of tokens are not); a finish by length is foreseen, so its row
and blocks are handed on as soon as its last step is enqueued; any other finish costs at most ``depth - 1`` rows whose
tokens are dropped. Engine thread only.
"""

import time
from bisect import insort
from collections import deque
from collections.abc import Iterable

from gapless.engine.block_pool import BlockPool
from gapless.engine.prefix_cache import CachedPrefix
from gapless.engine.request import Request, RequestState
from gapless.engine.step_plan import SchedulerLimits, StepPlan
from gapless.engine.wide_rows import WideRows
from gapless.pipeline.batch import ScheduledBatch
from gapless.sampling_params import ALL_LOGPROBS

__all__ = ["Scheduler", "SchedulerLimits"]


class Scheduler:
    """Running and waiting requests, and the rules that turn them into batches."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.num_preemptions = 0
        self.num_steps = 0
        self._num_followers = 0
        self.wide_rows = WideRows(limits.wide)
        self._free_rows = list(range(limits.max_rows - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        """Whether a request is running or waiting."""
        return bool(self.running or self.waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that have to be admitted yet, those who follow another one included."""
        return len(self.waiting) + self._num_followers

    def add(self, request: Request, *followers: Request) -> None:
        """Queue a new request behind all others; ``followers`` are the further choices for the same prompt.

        They share the blocks of the prompt whatever the setting of the prefix cache: without one, the blocks are
        registered under a salt that nobody else has.
        """
        for choice in (request, *followers):
            if not self.limits.prefix_caching:
                choice.num_cacheable_tokens = request.num_prompt_tokens if followers else 0
                choice.salt = b"choices of %d" % request.id
                choice.prefix = CachedPrefix.start(choice.salt)
            if choice is not request:
                choice.leader = request
                choice.prompt_logprobs, choice.num_rated_tokens = None, choice.num_prompt_tokens
        request.followers.extend(followers)
        self._num_followers += len(followers)
        self.waiting.append(request)

    def schedule(self) -> ScheduledBatch | None:
        """Build the next step, or return ``None`` when nothing can run now."""
        plan = StepPlan(self.num_steps, self.limits, self.wide_rows)
        self._continue_running(plan)
        self._admit_waiting(plan)
        if not plan.requests:
            return None
        self._retire(plan)
        self.num_steps += 1
        return plan.build()

    def leave(self, request: Request) -> None:
        """Give up a request's blocks and row; its steps in flight still return."""
        self.pool.release(reversed(request.blocks))
        request.blocks = []
        self._free_rows.append(request.row)
        request.row = -1
        if request.wide is not None:
            self.wide_rows.leave(request.wide_row)
            request.wide_row = -1
        request.residency += 1
        self.running.remove(request)

    def withdraw(self, request: Request) -> None:
        """Stop waiting or running for good, whatever the state; a retiring request has left already."""
        if request.state is RequestState.RUNNING:
            self.leave(request)
        elif request.leader is not None:
            request.leader.followers.remove(request)
            request.leader = None
            self._num_followers -= 1
        elif request.state is RequestState.WAITING:
            self.waiting.remove(request)
        self._release_followers(request)

    def register(self, request: Request, end: int) -> None:
        """Put the request's full blocks below ``end`` into the prefix cache: known tokens whose KV is enqueued."""
        size = self.limits.block_size
        full = min(request.num_computed_tokens, end - request.num_unsettled, request.num_cacheable_tokens) // size
        prefix = request.prefix
        if full <= prefix.num_blocks:
            return
        while prefix.num_blocks < full:
            index = prefix.num_blocks
            tokens = request.known_ids(index * size, (index + 1) * size).tobytes()
            prefix = self.pool.cache.add(prefix, tokens, request.blocks[index])
        request.prefix = prefix

    def forget_prefix(self, request: Request) -> None:
        """Take every cached block of the request's known tokens out of the prefix cache (its KV may be NaN)."""
        for _, block in list(self._cached_chain(request, request.num_known_tokens // self.limits.block_size)):
            self.pool.withdraw(block)

    # --- the rules, in the order they are applied ------------------------------------------------------------------

    def _continue_running(self, plan: StepPlan) -> None:
        prefills: list[Request] = []
        # A copy: preemption takes requests out of `running` meanwhile.
        for request in list(self.running):
            todo = request.num_prompt_tokens + len(request.output) + request.in_flight - request.num_computed_tokens
            if todo != 1:
                prefills.append(request)
            elif plan.budget and request.state is RequestState.RUNNING:
                self._put(plan, request, 1, todo)
        for request in prefills:
            if not plan.budget:
                return
            if request.state is RequestState.RUNNING:
                todo = request.num_known_tokens + request.in_flight - request.num_computed_tokens
                if num_tokens := plan.chunk(request, todo):
                    self._put(plan, request, num_tokens, todo)

    def _admit_waiting(self, plan: StepPlan) -> None:
        size = self.limits.block_size
        while self.waiting and not plan.short and plan.budget and self._free_rows:
            request = self.waiting[0]
            # A preempted request re-enters only when its tokens in flight have arrived: they become its prompt.
            if request.in_flight:
                return
            prefix, hits = request.prefix, []
            # The last token is always computed, since its logits are wanted.
            most = min(request.num_known_tokens - 1, request.num_cacheable_tokens) // size
            if request.num_rated_tokens < request.num_prompt_tokens:
                most = 0  # cached blocks hold no logits
            for prefix, block in self._cached_chain(request, most):  # noqa: B007
                hits.append(block)
            cached = len(hits) * size
            num_tokens = plan.chunk(request, request.num_known_tokens - cached)
            if not num_tokens:
                return
            needed = -(-(cached + num_tokens) // size) - len(hits)
            # One spare block for each running request; none when nothing runs, or a request that needs all of
            # them could never start.
            watermark = len(self.running)
            if self.pool.num_available - sum(map(self.pool.is_evictable, hits)) < needed + watermark:
                return
            if not plan.can_admit(request, len(hits) + needed):
                return
            if request.params.logprobs == ALL_LOGPROBS:
                full = sum(other.params.logprobs == ALL_LOGPROBS for other in self.running)
                if full >= self.limits.logprobs.max_full_rows:
                    return
            self.waiting.popleft()
            self._enter(plan, request, hits, prefix)
            self._put(plan, request, num_tokens, request.num_known_tokens - cached)

    def _enter(self, plan: StepPlan, request: Request, hits: list[int], prefix: CachedPrefix) -> None:
        """Give a waiting request its row and its cached blocks."""
        request.state = RequestState.RUNNING
        request.row = self._free_rows.pop()
        for block in hits:
            self.pool.share(block)
        request.blocks = hits
        request.prefix = prefix
        request.num_computed_tokens = len(hits) * self.limits.block_size
        if request.metrics.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            request.metrics.scheduled_s = time.perf_counter()
        insort(self.running, request, key=_arrival)
        plan.admit(request)

    def _put(self, plan: StepPlan, request: Request, num_tokens: int, todo: int) -> None:
        """Give a request ``num_tokens`` of the step, with blocks for them; it keeps its place if there are none."""
        end = request.num_computed_tokens + num_tokens
        short = -(-end // self.limits.block_size) - len(request.blocks)
        if short > 0:
            if not self._make_room(request, short):
                plan.short = True
                return
            for _ in range(short):
                plan.add_block(request, self.pool.take())
        entry = plan.add(request, num_tokens, todo)
        request.step = plan.step
        request.num_computed_tokens = end
        if entry.samples:
            request.in_flight += 1
        if end // self.limits.block_size > request.prefix.num_blocks:
            self.register(request, request.num_known_tokens)
        if request.followers and entry.final:
            self._release_followers(request)

    def _release_followers(self, leader: Request) -> None:
        """Queue those who waited for a prompt that is enqueued now, or never will be; they keep their arrival."""
        followers, leader.followers = leader.followers, []
        if not followers:
            return
        self._num_followers -= len(followers)
        place = self._place_by_arrival(leader)
        for follower in reversed(followers):
            follower.leader = None
            self.waiting.insert(place, follower)

    def _place_by_arrival(self, request: Request) -> int:
        return next((i for i, other in enumerate(self.waiting) if other.id > request.id), len(self.waiting))

    def _make_room(self, request: Request, needed: int) -> bool:
        """Have ``needed`` blocks available, preempting later arrivals that are not in this step if need be."""
        while self.pool.num_available < needed:
            victim = self.running[-1]
            for victim in reversed(self.running):
                if victim.id <= request.id:
                    return False
                if victim.step != self.num_steps:
                    break
            else:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, victim: Request) -> None:
        """Recompute later: its blocks go, its tokens in flight still arrive, and it waits in its place by arrival."""
        self.leave(victim)
        victim.state = RequestState.WAITING
        victim.num_computed_tokens = 0
        victim.prefix = CachedPrefix.start(victim.salt)
        victim.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.insert(self._place_by_arrival(victim), victim)

    def _retire(self, plan: StepPlan) -> None:
        """Release what finishes by length: this step is its last, and later steps run after it."""
        for request in plan.requests:
            if (
                len(request.output) + request.in_flight >= request.max_tokens
                and request.num_computed_tokens >= request.num_known_tokens
            ):
                self.register(request, request.num_known_tokens)
                self.leave(request)
                request.state = RequestState.RETIRING

    def _cached_chain(self, request: Request, most: int) -> Iterable[tuple[CachedPrefix, int]]:
        """The cached blocks that hold the request's known tokens from the start, at most ``most``."""
        size = self.limits.block_size
        prefix = CachedPrefix.start(request.salt)
        for index in range(most):
            found = self.pool.cache.find(prefix, request.known_ids(index * size, (index + 1) * size).tobytes())
            if found is None:
                return
            yield found
            prefix = found[0]


def _arrival(request: Request) -> int:
    return request.id

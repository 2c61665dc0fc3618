"""The ownership audit: who may touch which block, row and buffer. It catches what tokens cannot show.

:class:`AuditedScheduler` and :class:`AuditedCache` are the real ones plus checks, of every step as it is built and of
every block as it is registered. The audit knows what each request will give (:class:`Audit.truth`), so it sees at once
when a cache key holds anything else. Engine thread only.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gapless.engine.block_pool import BlockPool
from gapless.engine.prefix_cache import CachedPrefix, PrefixCache
from gapless.engine.request import Request, RequestState
from gapless.engine.scheduler import Scheduler, SchedulerLimits
from gapless.pipeline.batch import BatchEntry, ScheduledBatch
from simulation.solo import SoloOutput

__all__ = ["Audit", "AuditError", "AuditedCache", "AuditedScheduler", "Truth", "check"]


class AuditError(AssertionError):
    """A rule of ownership was broken."""


def check(holds: bool, what: str) -> None:
    """Raise :class:`AuditError` with ``what`` unless ``holds``."""
    if not holds:
        raise AuditError(what)


@dataclass(frozen=True, slots=True)
class Truth:
    """A request's prompt and expected output, and how many of these tokens are fed to the model."""

    ids: tuple[int, ...]
    num_fed: int

    @staticmethod
    def of(prompt: Sequence[int], expected: SoloOutput) -> "Truth":
        """The last token is never fed back, so past EOS there is nothing to cache; NaN ends it one step later."""
        ids = (*prompt, *expected.token_ids)
        last_is_fed = expected.finish_reason == "error" or not expected.token_ids
        return Truth(ids, len(ids) - (not last_is_fed))


class Audit:
    """What the audit knows besides the engine's own state.

    Attributes:
        requests: every request ever added, by id.
        truth: what each request will come to, set before it is added.
        num_samples: in how many sampling entries each request took part.
        tables: the device's block tables as they will be after the latest step's changes.
    """

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.truth: dict[int, Truth] = {}
        self.num_samples: Counter[int] = Counter()
        self.tables: dict[tuple[int, int], int] = {}
        self.step = -1
        self._registered: dict[int, int] = {}  # in which step each block was last put into the cache
        self._residencies: dict[int, int] = {}

    def registering(self, scheduler: Scheduler, index: int, tokens: bytes, block: int) -> None:
        """A block is about to become the ``index``-th of a cached prefix."""
        size = scheduler.limits.block_size
        start, end = index * size, (index + 1) * size
        holders = [r for r in scheduler.running if r.blocks[index : index + 1] == [block]]
        check(bool(holders), f"block {block} is registered at {start} and no running request has it there")
        for holder in holders:
            true = self.truth[holder.id]
            check(end <= true.num_fed, f"request {holder.id} registers up to {end} and is fed {true.num_fed} tokens")
            check(end <= holder.num_computed_tokens, f"request {holder.id} registers block {block} before it is full")
            check(
                tokens == holder.known_ids(start, end).tobytes() == _bytes_of(true.ids[start:end]),
                f"request {holder.id} registers block {block} under tokens that are not its own",
            )

    def registered(self, block: int) -> None:
        """A block has become part of the cache."""
        self._registered[block] = self.step

    def check_batch(self, scheduler: Scheduler, batch: ScheduledBatch) -> None:
        """Check a step that was just built."""
        limits = scheduler.limits
        changes = {(change.row, change.column): change.block for change in batch.table_changes}
        check(len(changes) == len(batch.table_changes), "two changes of one block-table entry in one step")
        check(len(changes) <= limits.max_changes, f"{len(changes)} table changes exceed {limits.max_changes}")
        self.tables.update(changes)
        num_tokens = sum(entry.num_tokens for entry in batch.entries)
        check(num_tokens <= limits.token_budget, f"{num_tokens} tokens exceed the budget {limits.token_budget}")
        rows = [entry.row for entry in batch.entries]
        check(len(set(rows)) == len(rows) and max(rows) < limits.max_rows, f"rows {rows} are not unique rows")
        for entry in batch.entries:
            self._check_entry(scheduler, entry)
            self.num_samples[entry.request_id] += entry.samples
        self._check_blocks(scheduler, batch)

    def check_pool(self, scheduler: Scheduler) -> None:
        """Check that the pool's counts are those of the holders."""
        pool = scheduler.pool
        held = [0] * (pool.num_blocks + 1)
        for request in scheduler.running:
            for block in request.blocks:
                held[block] += 1
        check(pool.references == held, f"blocks have {pool.references} references and {held} holders")
        check(held[0] == 0, "the reserved block was handed out")
        in_use = len(held) - held.count(0)
        total = pool.num_free + pool.num_evictable + in_use
        check(total == pool.num_blocks, f"{pool.num_free} free, {pool.num_evictable} cached and {in_use} held blocks")
        rows = [request.row for request in scheduler.running]
        check(len(set(rows)) == len(rows), f"running requests share a row: {rows}")
        wide = [request.wide_row for request in scheduler.running if request.wide is not None]
        check(len(set(wide)) == len(wide), f"running requests share a wide row: {wide}")
        free = scheduler.wide_rows.num_free
        check(free + len(wide) == scheduler.limits.wide.max_rows, f"{free} wide rows are free and {len(wide)} held")

    def _check_entry(self, scheduler: Scheduler, entry: BatchEntry) -> None:
        request = self.requests[entry.request_id]
        who = f"request {request.id}"
        check(0 < entry.num_tokens <= scheduler.limits.chunk_size, f"{who} has {entry.num_tokens} tokens in a step")
        end = entry.start + entry.num_tokens
        if request.state is RequestState.RUNNING:
            check(entry.row == request.row and entry.residency == request.residency, f"{who} is not in its row")
            check(end == request.num_computed_tokens, f"{who} has computed {request.num_computed_tokens}, not {end}")
            table = [self.tables.get((entry.row, column), 0) for column in range(len(request.blocks))]
            check(table == request.blocks, f"{who} holds {request.blocks}, its device table is {table}")
            check(len(set(table)) == len(table), f"{who} holds a block twice: {table}")
        else:
            check(request.state is RequestState.RETIRING, f"{who} is in the step and {request.state.value}")
        check(request.in_flight >= 0, f"{who} has {request.in_flight} tokens in flight")
        if self._residencies.get(request.id) != entry.residency:
            self._residencies[request.id] = entry.residency
            check(request.in_flight == entry.samples, f"{who} enters with tokens of an earlier stay in flight")
        check(not (entry.final and request.followers), f"{who}'s prompt is enqueued, and its other choices still wait")
        check(not entry.samples or entry.final, f"{who} samples before its last token")

    def _check_blocks(self, scheduler: Scheduler, batch: ScheduledBatch) -> None:
        """Written blocks belong to one entry; others of the step may read them below their start, once registered."""
        size = scheduler.limits.block_size
        writer: dict[int, BatchEntry] = {}
        for entry in batch.entries:
            for column in range(entry.start // size, _blocks(entry, size)):
                block = self.tables.get((entry.row, column), 0)
                check(0 < block <= scheduler.pool.num_blocks, f"request {entry.request_id} writes block {block}")
                check(block not in writer, f"block {block} is written twice in a step")
                writer[block] = entry
                registered_now = self._registered.get(block) == batch.step
                check(
                    registered_now or block not in scheduler.pool.cache,
                    f"request {entry.request_id} writes block {block}, which is registered",
                )
                running = self.requests[entry.request_id].state is RequestState.RUNNING
                references = scheduler.pool.references[block]
                check(
                    references == running or registered_now,
                    f"block {block} is written by request {entry.request_id} and has {references} references",
                )
        for entry in batch.entries:
            for column in range(_blocks(entry, size)):
                block = self.tables[entry.row, column]
                owner = writer.get(block, entry)
                if owner is not entry:
                    shared = self._registered.get(block) == batch.step and (column + 1) * size <= entry.start
                    check(shared, f"request {entry.request_id} reads block {block}, which {owner.request_id} writes")


class AuditedCache(PrefixCache):
    """A prefix cache that shows the audit what is registered."""

    def __init__(self, audit: Audit) -> None:
        super().__init__()
        self._audit = audit
        self.scheduler: Scheduler | None = None

    def add(self, prefix: CachedPrefix, tokens: bytes, block: int) -> CachedPrefix:
        """Check, then register."""
        assert self.scheduler is not None
        self._audit.registering(self.scheduler, prefix.num_blocks, tokens, block)
        known = block in self
        longer = super().add(prefix, tokens, block)
        if not known and block in self:
            self._audit.registered(block)
        return longer


class AuditedScheduler(Scheduler):
    """A scheduler whose every step is checked before it goes out."""

    def __init__(self, limits: SchedulerLimits, num_blocks: int, audit: Audit) -> None:
        cache = AuditedCache(audit)
        super().__init__(limits, BlockPool(num_blocks, cache))
        cache.scheduler = self
        self._audit = audit

    def add(self, request: Request, *followers: Request) -> None:
        """Queue choices that the audit follows."""
        self._audit.requests.update((choice.id, choice) for choice in (request, *followers))
        super().add(request, *followers)

    def schedule(self) -> ScheduledBatch | None:
        """Build a step and check it."""
        self._audit.step = self.num_steps
        batch = super().schedule()
        if batch is not None:
            self._audit.check_batch(self, batch)
        return batch


def _blocks(entry: BatchEntry, size: int) -> int:
    return -(-(entry.start + entry.num_tokens) // size)


def _bytes_of(tokens: tuple[int, ...]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)

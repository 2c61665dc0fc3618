"""Random ragged batches over a paged cache in which everything that no kernel may read is NaN."""

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gapless.layers.forward_inputs import ForwardInputs, StepBounds


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Shapes of a batch's layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One request of a batch: how many tokens are new, and how many its context has with them."""

    query_len: int
    seq_len: int


# What pads a captured decode step: one token at position 0 on the reserved row, whose table names the reserved block.
PADDING = Entry(query_len=1, seq_len=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedBatch:
    """One layer's attention problem. Slots outside every context hold NaN in ``keys`` and ``values``."""

    inputs: ForwardInputs
    layout: Layout
    q: Tensor
    keys: Tensor
    values: Tensor

    @property
    def scale(self) -> float:
        return self.layout.head_dim**-0.5

    def slots(self, entry: int) -> Tensor:
        """Slots of an entry's context in order of position."""
        size = self.layout.block_size
        at = torch.arange(self.inputs.host_seq_lens[entry], device=self.q.device)
        table = self.inputs.block_tables[self.inputs.rows[entry]].long()
        return table[at // size] * size + at % size


def make_batch(entries: list[Entry], layout: Layout, *, seed: int, padding: int = 0, device: str = "cpu") -> PagedBatch:
    """Build a batch with shuffled rows and blocks, a strided ``q``, and ``padding`` entries at its end."""
    generator = torch.Generator().manual_seed(seed)
    size, count = layout.block_size, len(entries)
    width = max(-(-e.seq_len // size) for e in entries) + 2
    blocks = 1 + torch.randperm(count * width, generator=generator)
    tables = torch.zeros((count + 1, width), dtype=torch.int32)
    rows = torch.randperm(count, generator=generator)
    num_slots = (count * width + 1) * size
    kv = torch.full((2, num_slots, layout.num_kv_heads, layout.head_dim), float("nan"), dtype=layout.dtype)
    kv[:, 0] = torch.randn((2, layout.num_kv_heads, layout.head_dim), generator=generator)
    slot_parts, position_parts = [], []
    for index, (entry, row) in enumerate(zip(entries, rows.tolist(), strict=True)):
        used = -(-entry.seq_len // size)
        tables[row, :used] = blocks[index * width : index * width + used].int()
        at = torch.arange(entry.seq_len)
        slots = tables[row].long()[at // size] * size + at % size
        kv[:, slots] = torch.randn((2, entry.seq_len, *kv.shape[2:]), generator=generator).to(layout.dtype)
        slot_parts.append(slots[entry.seq_len - entry.query_len :])
        position_parts.append(at[entry.seq_len - entry.query_len :])
    slot_parts += [torch.zeros(padding, dtype=torch.int64)]
    position_parts += [torch.zeros(padding, dtype=torch.int64)]
    every = [*entries, *[PADDING] * padding]
    lens = torch.tensor([0] + [e.query_len for e in every])
    num_tokens = int(lens.sum())
    # Like q of a fused qkv product: a view with other columns beside it.
    columns = (layout.num_heads + 2 * layout.num_kv_heads) * layout.head_dim
    qkv = torch.randn((num_tokens, columns), generator=generator).to(layout.dtype).to(device)
    inputs = ForwardInputs(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.cat(position_parts).to(device),
        slot_mapping=torch.cat(slot_parts).to(device),
        query_starts=lens.cumsum(0).int().to(device),
        seq_lens=torch.tensor([e.seq_len for e in every], dtype=torch.int32, device=device),
        rows=torch.cat([rows, torch.full((padding,), count)]).int().to(device),
        block_tables=tables.to(device),
        logits_indices=torch.zeros(0, dtype=torch.int64, device=device),
        host_query_lens=tuple(e.query_len for e in every),
        host_seq_lens=tuple(e.seq_len for e in every),
    )
    return PagedBatch(
        inputs=inputs,
        layout=layout,
        q=qkv[:, : layout.num_heads * layout.head_dim].view(num_tokens, layout.num_heads, layout.head_dim),
        keys=kv[0].to(device),
        values=kv[1].to(device),
    )


def random_entries(kind: str, seed: int, *, most: int) -> list[Entry]:
    """Ragged entries: ``decode``, ``prefill`` (whole prompts and later chunks, of one token too), or ``mixed``."""
    draw = random.Random(f"{kind} {seed}")
    entries = []
    for _ in range(draw.randint(1, 6)):
        seq_len = draw.choice([1, 2, draw.randint(1, 40), draw.randint(1, most)])
        decode = kind == "decode" or (kind == "mixed" and draw.random() < 0.5)
        query_len = 1 if decode else draw.choice([seq_len, draw.randint(1, seq_len)])
        entries.append(Entry(query_len=query_len, seq_len=seq_len))
    return entries


def with_inputs(batch: PagedBatch, **changes: object) -> PagedBatch:
    """The batch with other tensors in its inputs."""
    return replace(batch, inputs=replace(batch.inputs, **changes))  # type: ignore[arg-type]


def with_bounds(batch: PagedBatch, *, num_tokens: int, num_entries: int, bounds: StepBounds) -> PagedBatch:
    """The batch padded as a mixed step: tokens of no entry, entries of no token, and bounds in place of lengths."""
    inputs, device = batch.inputs, batch.q.device
    tokens, entries = num_tokens - len(inputs.positions), num_entries - len(inputs.rows)
    reserved_row = len(inputs.block_tables) - 1

    def padded(values: Tensor, count: int, fill: int) -> Tensor:
        return torch.cat((values, torch.full((count,), fill, dtype=values.dtype, device=device)))

    return replace(
        batch,
        q=torch.cat((batch.q, torch.full((tokens, *batch.q.shape[1:]), 7.0, dtype=batch.q.dtype, device=device))),
        inputs=replace(
            inputs,
            input_ids=padded(inputs.input_ids, tokens, 0),
            positions=padded(inputs.positions, tokens, 0),
            slot_mapping=padded(inputs.slot_mapping, tokens, 0),
            query_starts=padded(inputs.query_starts, entries, len(inputs.positions)),
            seq_lens=padded(inputs.seq_lens, entries, 0),
            rows=padded(inputs.rows, entries, reserved_row),
            host_query_lens=(),
            host_seq_lens=(),
            bounds=bounds,
        ),
    )


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; NaN if either holds a NaN."""
    return ((result.float() - expected).norm() / expected.norm()).item()

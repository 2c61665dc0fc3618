"""A user's own change of the logits: :data:`LogitsProcessor`, called once for all samples of a step.

It runs on the compute stream between forward and sampling, where the tokens of the step before are known to the device
and not yet to the host. So it must be written for the device, or it would make the device wait for the host:

- no ``.item()``, ``.tolist()``, ``.cpu()``, no ``if`` on a tensor's value, no boolean indexing, no
  ``torch.tensor(..., device="cuda")``; use ``torch.where``, ``scatter``, ``index_select`` and tensors made beforehand;
- it may change the logits in place, and must not keep them: their memory belongs to the next step;
- it sees raw logits, before biases, penalties and temperature. Log-probs stay those of the model;
- an exception that it raises ends the engine.

A processor that never lets a token follow itself::

    def no_doubles(logits, rows):
        return logits.scatter(1, rows.input_tokens[:, None], float("-inf"))

    llm = LLM("smollm2", logits_processor=no_doubles)

With a processor, steps sample by ordinary launches and not by a captured graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

__all__ = ["LogitsProcessor", "SampledRows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledRows:
    """What is known of the samples of a step, in the order of the logits.

    Samples that pad a step stand at its end, with the request id -1; what they get is thrown away.

    Attributes:
        request_ids: on the host: the engine's id of each sample's request, for state that a processor keeps itself.
        rows: ``[num_samples]``, int64, device: the request's place. It passes on to others, and a request that was
            preempted comes back on another one.
        input_tokens: ``[num_samples]``, int64, device: the token after which the logits come: the last one sampled, or
            the prompt's last. Exact at every depth.
        output_positions: ``[num_samples]``, int32, device: index of the token to be sampled in the request's output.
    """

    request_ids: tuple[int, ...]
    rows: Tensor
    input_tokens: Tensor
    output_positions: Tensor


LogitsProcessor: TypeAlias = Callable[[Tensor, SampledRows], Tensor]
"""Takes logits, ``[num_samples, vocab_size]``, fp32, and returns others of the same shape, dtype and device."""

"""Triton kernels for CUDA devices, each beside its plain torch reference.

The idea: every kernel here replaces a plain torch function of the same meaning, which stays in the tree as the
definition of what is right. Kernels read lengths, rows and tables on the device; the host chooses launch sizes from
counts it knows, so that nothing here waits for the device and everything can be captured in a CUDA graph.

- ``paged_attention``: :class:`~gapless.kernels.paged_attention.TritonAttention`, the attention backend for CUDA.
- ``work_list``: which part of which context each program of an attention launch reads, decided on the device.
- ``attend_tiles``: the attention kernel itself, for prefill, chunked prefill and decode.
- ``draw``: temperature, filters and the draw of a token, without sorting the vocabulary.
- ``penalties``: repetition, frequency and presence penalty in one pass over the logits.
- ``layer_ops``: the work between matrix products: residual and norm, rotation and cache write, the gate.

Importing these modules imports Triton, so only code that runs on a CUDA device does so. Set ``TRITON_INTERPRET=1``
before Triton is imported to run the kernels on a CPU, in fp32 only.
"""

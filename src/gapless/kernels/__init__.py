"""Triton kernels for CUDA devices, each beside its plain torch reference.

The idea: every kernel here replaces a plain torch function of the same meaning, which stays in the tree as the
definition of what is right. Kernels read lengths, rows and tables on the device; the host chooses launch sizes from
counts it knows, so that nothing here waits for the device and everything can be captured in a CUDA graph.

- ``paged_attention``: :class:`~gapless.kernels.paged_attention.TritonAttention`, the attention backend for CUDA.
- ``work_list``: which part of which context each program of an attention launch reads, decided on the device.
- ``attention_tiles``: the sizes of tiles.
- ``attend_tiles``: the attention kernel itself, for prefill, chunked prefill and decode.
- ``prefill_attention``: that of long prompts, for Hopper, in Gluon.
- ``draw``: temperature, filters and the draw of a token, without sorting the vocabulary.
- ``penalties``: repetition, frequency and presence penalty in one pass over the logits.
- ``step_edges``: what stands before and after the model in a step, and the largest logit.
- ``layer_ops``: :class:`~gapless.kernels.layer_ops.TritonOps`, a layer's operations, out of the next five and the
  library's products.
- ``elementwise``: the work between matrix products: residual and norm, rotation and cache write, the gate.
- ``skinny``: matrix products of few tokens, bound by reading the weights.
- ``fused_products``: such products that do the residual add, the next norm or the gate as well.
- ``streamed_products``: those two for Hopper, in Gluon: weights are on their way before the kernel may start.
- ``tuned_table``: which products these kernels do, and with which tiles: data, measured on each device (``tuned/``).
- ``gluon_support``: where kernels in Gluon are used; ``tma_boxes``: how TMA reads their matrices.
- ``launch``: how each of them is launched, at little cost to the host, and compiled ahead.
- ``dependent_launch``: a kernel is made ready while the one before it still runs.

Importing these modules imports Triton, so only code that runs on a CUDA device does so. Set ``TRITON_INTERPRET=1``
before Triton is imported to run the kernels on a CPU, in fp32 only.
"""

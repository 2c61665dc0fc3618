"""Where the host may wait for the device: one place, and nowhere else by accident.

Calls that block on a CUDA tensor look harmless on a CPU (``.item()``, ``.tolist()``), so every one in the packages of
the device step is listed here with the reason why it never touches a tensor that is being computed.
"""

import ast
from collections.abc import Iterator

from source_tree import SourceFile, source_files, walk_scoped

HOT = ("pipeline/", "engine/", "model/", "sampling/", "layers/", "kernels/")
BLOCKING = {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize", "masked_select", "unique", "argwhere"}

ALLOWED = {
    ("pipeline/ring.py", "Ring.collect"): "the one wait for the device, of the oldest step in flight",
    ("pipeline/streams/cuda.py", "CudaEvent.synchronize"): "what Ring.collect waits with",
    ("pipeline/streams/cuda.py", "CudaQueues.close"): "the engine has ended: memory may be freed only now",
    ("pipeline/batch.py", "BatchBuilder.build"): "NumPy arrays of the host",
    ("pipeline/device_step.py", "DeviceStep.forward"): "counts and lengths of the batch, NumPy arrays of the host",
    ("pipeline/step_buffers.py", "StepBuffers.__init__"): "views of pinned host memory, made once",
    ("engine/warm_up.py", "warm_up"): "before serving: weights and cache are ready when the loop starts",
    ("engine/logprobs.py", "token_logprobs_of"): "a collected step's log-probs, copied out by the ring",
    ("engine/results.py", "ResultApplier.apply"): "a collected step's tokens, copied out by the ring",
    ("model/runner.py", "measure_activation_peak"): "before serving, to measure",
    ("model/checkpoint/presets.py", "_rope_of"): "a host tensor, at load",
    ("model/families/rope_settings.py", "rope_from_config"): "a host tensor, at load",
    ("kernels/paged_attention.py", "paged_attention_reference"): "the plain reference that tests compare with",
    ("kernels/work_list.py", "work_list_reference"): "the plain reference that tests compare with",
}


def blocking_calls(file: SourceFile) -> Iterator[tuple[str, str]]:
    """(function, what it calls) for each call that can block, or that copies from pageable memory to a device."""
    for item in walk_scoped(file.tree):
        if not isinstance(item.node, ast.Call) or not isinstance(item.node.func, ast.Attribute):
            continue
        name = item.node.func.attr
        uploads = name in {"tensor", "as_tensor"} and any(key.arg == "device" for key in item.node.keywords)
        if name in BLOCKING or uploads:
            yield item.scope, name


def test_blocking_calls_stand_only_where_a_reason_is_given() -> None:
    found = {
        (file.name, function): call
        for file in source_files()
        if file.name.startswith(HOT)
        for function, call in blocking_calls(file)
    }
    unexplained = {place: call for place, call in found.items() if place not in ALLOWED}
    assert not unexplained, f"these may block the host: {unexplained}"
    stale = set(ALLOWED) - set(found)
    assert not stale, f"allowed, but no longer there: {stale}"


def test_the_loop_waits_in_one_place() -> None:
    not_the_loop = ("pipeline/streams/", "engine/warm_up.py")
    places = [
        (file.name, function)
        for file in source_files()
        if file.name.startswith(("pipeline/", "engine/")) and not file.name.startswith(not_the_loop)
        for function, call in blocking_calls(file)
        if call == "synchronize"
    ]
    assert places == [("pipeline/ring.py", "Ring.collect")]


def test_the_search_sees_what_it_should() -> None:
    text = "class A:\n    def f(self, x):\n        torch.tensor([1], device='cuda')\n        return x.item()\n"
    file = SourceFile(name="a.py", module="a", text=text, tree=ast.parse(text))
    assert list(blocking_calls(file)) == [("A.f", "tensor"), ("A.f", "item")]

"""The roofline: what a step must read, worked out by hand, and shares of what this device can read."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from ring_recordings import MS, Durations, ring_recording

from fixtures.served_models import hist_checkpoint
from gapless import LLM, SamplingParams
from gapless.errors import ConfigError
from gapless.timeline.roofline import Roofline, measure_read_bandwidth, read_bytes, roofline_of, step_share
from gapless.timeline.spans import DeviceLane, DeviceLimits, Recording

LIMITS = DeviceLimits(device_name="a device", weight_bytes=1_000_000, kv_bytes_per_token=100, read_bytes_per_s=1e9)


def test_a_step_reads_all_weights_and_every_context() -> None:
    step = ring_recording(num_steps=1).steps[0]

    assert read_bytes(replace(step, num_context_tokens=500), LIMITS) == 1_050_000


def test_layers_with_a_window_read_no_further() -> None:
    step = replace(ring_recording(num_steps=1).steps[0], num_context_tokens=500, num_window_tokens=60)

    assert read_bytes(step, replace(LIMITS, window=8, window_kv_bytes_per_token=100)) == 1_006_000
    assert read_bytes(step, replace(LIMITS, window=8, window_kv_bytes_per_token=25)) == 1_000_000 + 75 * 500 + 25 * 60


def test_a_steps_share_is_of_its_compute_time() -> None:
    step = ring_recording(num_steps=2, num_prefills=1, durations=Durations(compute_s=2 * MS)).steps[1]
    step = replace(step, num_context_tokens=0)

    assert step_share(step, LIMITS) == pytest.approx(0.5)
    assert step_share(step, replace(LIMITS, read_bytes_per_s=None)) is None
    assert step_share(replace(step, num_prefill_tokens=64), LIMITS) is None, "prefill is bound by arithmetic"


def test_a_run_counts_decode_steps_and_the_idle_time_before_them() -> None:
    made = ring_recording(depth=1, num_steps=11, num_prefills=1, durations=Durations(compute_s=4 * MS))
    made = replace(made, limits=LIMITS, steps=tuple(replace(step, num_context_tokens=10_000) for step in made.steps))
    found = roofline_of(made)
    compute = [step.device[DeviceLane.COMPUTE] for step in made.steps]

    assert (found.decode_steps, found.read_bytes) == (10, 10 * 2_000_000)
    assert found.floor_s == pytest.approx(10 * 2 * MS)
    assert found.busy_s == pytest.approx(10 * 4 * MS)
    assert found.busy_share == pytest.approx(0.5)
    assert found.elapsed_s == pytest.approx(compute[-1].end_s - compute[0].end_s)
    assert found.share == pytest.approx(10 * 2 * MS / found.elapsed_s)


def test_sleeps_do_not_lower_the_share() -> None:
    def share(made: Recording) -> float:
        found = roofline_of(replace(made, limits=LIMITS))
        assert found.share is not None
        return found.share

    assert share(ring_recording(sleep_before={20: 5.0})) == pytest.approx(share(ring_recording()), rel=0.01)


def test_nothing_has_no_share() -> None:
    empty = roofline_of(replace(ring_recording(num_steps=1, num_prefills=1), limits=LIMITS))
    assert (empty.decode_steps, empty.share, empty.busy_share) == (0, None, None)
    unmeasured = roofline_of(ring_recording(read_bytes_per_s=None))
    assert (unmeasured.floor_s, unmeasured.share, unmeasured.busy_share) == (None, None, None)
    assert unmeasured.decode_steps == 49


def test_what_was_added_since_an_earlier_moment() -> None:
    def sums(number: int) -> Roofline:
        return Roofline(
            decode_steps=number,
            read_bytes=10 * number,
            busy_s=2.0 * number,
            elapsed_s=3.0 * number,
            read_bytes_per_s=5.0,
        )

    assert sums(9).since(sums(5)) == sums(4)


@pytest.mark.parametrize(
    ("arch", "options", "window", "windowed_layers"),
    [
        ("llama", {}, None, 0),
        ("mistral", {"sliding_window": 8}, 8, 2),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            8,
            1,
        ),
    ],
)
def test_limits_are_those_of_the_model(
    tmp_path: Path, arch: Any, options: dict[str, Any], window: int | None, windowed_layers: int
) -> None:
    hist_checkpoint(tmp_path, arch=arch, **options)
    with LLM(tmp_path, device="cpu", num_blocks=64, timeline=True) as llm:
        llm.generate([[1] * 10], SamplingParams(temperature=0, max_tokens=3))
        recording = llm.timeline.recording()

    layer_bytes = 2 * 2 * 32 * 4  # K and V of 2 heads of 32 fp32 numbers
    assert recording.limits.kv_bytes_per_token == 2 * layer_bytes
    assert (recording.limits.window, recording.limits.window_kv_bytes_per_token) == (
        window,
        windowed_layers * layer_bytes,
    )
    decode = recording.steps[2]
    assert decode.num_context_tokens == 12
    context = (2 - windowed_layers) * 12 + windowed_layers * 8
    assert read_bytes(decode, recording.limits) == recording.limits.weight_bytes + context * layer_bytes


def test_the_bandwidth_of_this_machine_can_be_measured() -> None:
    assert 1e8 < measure_read_bandwidth(torch.device("cpu")) < 1e13


def test_memory_that_others_need_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 << 20))

    with pytest.raises(ConfigError, match=r"104857600 bytes of memory are free.*needs 134217728"):
        measure_read_bandwidth(torch.device("cpu"))

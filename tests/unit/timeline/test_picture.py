"""Pictures: what is drawn, by the figures that are in them, and that drawing works for every kind of run."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from ring_recordings import MS, START_S, Durations, ring_recording

from gapless.errors import ConfigError
from gapless.timeline.idle import IdleCause
from gapless.timeline.palette import BUSY, IDLE, IDLE_CAUSES, PHASES, buffers_colour
from gapless.timeline.picture import draw_steps, draw_timeline, save_picture
from gapless.timeline.shares import coarse_edges, fine_edges, shares_of_bins
from gapless.timeline.spans import DeviceLane, Recording, Span
from gapless.timeline.steady_steps import steady_steps

RECORDINGS = {
    "depth 1": ring_recording(depth=1, num_steps=30),
    "depth 2": ring_recording(depth=2, num_steps=30),
    "depth 7": ring_recording(depth=7, num_steps=30),
    "sleeping": ring_recording(num_steps=30, sleep_before={10: 0.5, 20: 2.0}),
    "dropped": ring_recording(num_steps=30, first_step=1000, num_dropped=1000),
    "one step": ring_recording(num_steps=1),
    "no bandwidth": ring_recording(num_steps=5, read_bytes_per_s=None),
    "tiny device times": ring_recording(num_steps=30, durations=Durations(compute_s=1e-6, h2d_s=0, d2h_s=0)),
}


def svg_texts(figure: Figure, tmp_path: Path) -> list[str]:
    save_picture(figure, tmp_path / "a.svg", "svg")
    return re.findall(r"<text[^>]*>([^<]+)</text>", (tmp_path / "a.svg").read_text("utf-8"))


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_kind_of_run_can_be_drawn(name: str, tmp_path: Path) -> None:
    figure = draw_timeline(RECORDINGS[name])
    save_picture(figure, tmp_path / "a.png", "png")
    pixels = imread(tmp_path / "a.png")
    assert pixels.shape[0] > 600
    assert pixels.shape[1] > 1200
    texts = svg_texts(figure, tmp_path)
    assert any(text.startswith("device active ") for text in texts)
    assert {"host", "h2d", "compute", "d2h"} <= set(texts)


def share_of_colour(figure: Figure, colour: str) -> float:
    """Of the pixels of a figure's first axes."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    file.seek(0)
    pixels = imread(file)[..., :3]
    box = figure.axes[0].get_window_extent()
    height = pixels.shape[0]
    inside = pixels[height - round(box.y1) : height - round(box.y0), round(box.x0) : round(box.x1)]
    return float(np.mean(np.all(np.abs(inside - to_rgb(colour)) < 0.02, axis=-1)))


@pytest.mark.parametrize(("depth", "num_steps"), [(1, 400), (2, 400), (1, 5000)])
def test_the_green_area_is_the_time_the_device_was_busy(depth: int, num_steps: int) -> None:
    recording = ring_recording(depth=depth, num_steps=num_steps)
    active = 4 / 5.4 if depth == 1 else 1.0
    figure = draw_timeline(recording)
    assert share_of_colour(figure, BUSY) == pytest.approx(active, abs=0.03)
    assert share_of_colour(figure, IDLE) == pytest.approx(1 - active, abs=0.03)


def test_the_largest_cause_lies_at_the_bottom() -> None:
    slow = Durations(apply_s=0.9 * MS, write_s=0.5 * MS)
    lower = draw_timeline(ring_recording(depth=1, num_steps=400, durations=slow)).axes[1]
    layers = [to_hex(patch.get_facecolor()).upper() for patch in lower.patches]
    assert layers[:3] == [IDLE_CAUSES[each] for each in (IdleCause.APPLY, IdleCause.WRITE, IdleCause.SCHEDULE)]
    assert len(layers) == 6


def test_text_of_an_svg_is_text_and_files_repeat(tmp_path: Path) -> None:
    recording = ring_recording(num_steps=10)
    contents = set()
    for name in ("a.svg", "b.svg"):
        save_picture(draw_timeline(recording), tmp_path / name, "svg")
        contents.add((tmp_path / name).read_bytes())
    assert len(contents) == 1
    assert b"schedule" in contents.pop()


def test_the_headline_has_the_numbers(tmp_path: Path) -> None:
    texts = svg_texts(draw_timeline(ring_recording(depth=1, num_steps=400)), tmp_path)
    assert any(re.match(r"device active 74\.\d\d% of 2\.16 s, idle 55\d\.\d\d ms", text) for text in texts)
    assert any("400 steps" in text and "depth 1" in text and "a device" in text for text in texts)


def test_the_close_up_tells_buffers_and_phases_apart(tmp_path: Path) -> None:
    figure = draw_steps(ring_recording(depth=3, num_steps=40))
    colours = {to_hex(patch.get_facecolor()).upper() for patch in figure.axes[0].patches}
    assert {buffers_colour(each) for each in range(3)} <= colours
    assert set(PHASES.values()) <= colours
    lowest = min(patch.get_height() for patch in figure.axes[0].patches)
    stripes = [patch for patch in figure.axes[0].patches if patch.get_height() == lowest]
    assert {to_hex(patch.get_facecolor()).upper() for patch in stripes} == {buffers_colour(each) for each in range(3)}
    texts = svg_texts(figure, tmp_path)
    assert {"buffers A", "buffers B", "buffers C"} <= set(texts)
    assert len([text for text in texts if re.fullmatch(r"[ABC]: step \d+, 8 rows", text)]) == 5


def test_steps_can_be_chosen(tmp_path: Path) -> None:
    recording = ring_recording(num_steps=50, first_step=100)
    assert "steps 107 to 111" in svg_texts(draw_steps(recording, zoom=107), tmp_path)
    assert "step 149" in svg_texts(draw_steps(recording, zoom=149), tmp_path)
    with pytest.raises(ConfigError, match="zoom=99 is not recorded: the timeline holds steps 100 to 149"):
        draw_steps(recording, zoom=99)


def test_nothing_recorded_cannot_be_drawn() -> None:
    with pytest.raises(ConfigError, match="no steps: generate something first"):
        draw_timeline(ring_recording(num_steps=0))


def chosen(recording: Recording) -> range:
    steps = steady_steps(recording, 5)
    assert [record.step for record in steps] == list(range(steps[0].step, steps[0].step + 5))
    return range(steps[0].step, steps[-1].step + 1)


def test_steps_that_stand_for_the_run_are_in_its_middle() -> None:
    assert abs(chosen(ring_recording(num_steps=200))[2] - 100) <= 2


def test_slow_steps_and_sleeps_do_not_stand_for_the_run() -> None:
    slow = Durations(compute_s=40 * MS)
    assert not set(range(95, 106)) & set(
        chosen(ring_recording(num_steps=200, odd_steps=dict.fromkeys(range(95, 106), slow)))
    )
    around_a_sleep = chosen(ring_recording(num_steps=200, sleep_before={100: 1.0}))
    assert not (99 in around_a_sleep and 100 in around_a_sleep)


def test_a_run_of_many_short_periods_is_shown_between_two_sleeps() -> None:
    recording = ring_recording(num_steps=210, sleep_before=dict.fromkeys(range(7, 210, 7), 1.0))
    assert len({step // 7 for step in chosen(recording)}) == 1


def test_few_steps_are_all_shown() -> None:
    recording = ring_recording(num_steps=3)
    assert list(steady_steps(recording, 5)) == list(recording.steps)
    alone = ring_recording(num_steps=6, sleep_before=dict.fromkeys(range(1, 6), 0.1))
    assert len(steady_steps(alone, 5)) == 5


@pytest.mark.parametrize("num_steps", [3, 100, 1000])
def test_bins_hold_all_the_time_and_no_more(num_steps: int) -> None:
    recording = ring_recording(depth=1, num_steps=num_steps, sleep_before={2: 0.1})
    busy = [record.device[DeviceLane.COMPUTE] for record in recording.steps]
    for edges in (fine_edges(START_S, START_S + 10, num_steps), coarse_edges(START_S, START_S + 10, num_steps)):
        shares = shares_of_bins(busy, edges)
        assert shares.min() >= 0
        assert shares.max() <= 1 + 1e-9
        assert float(np.sum(shares * np.diff(edges))) == pytest.approx(num_steps * 4 * MS)
    assert not shares_of_bins([], edges).any()


def test_a_bin_is_shared_by_the_time_in_it() -> None:
    edges = np.array([0.0, 1.0, 2.0, 4.0])
    spans = [Span(0.5, 1.25), Span(1.5, 1.75), Span(3.0, 9.0)]
    assert shares_of_bins(spans, edges) == pytest.approx([0.5, 0.5, 0.5])


def test_colours_differ() -> None:
    for palette in (list(PHASES.values()), list(IDLE_CAUSES.values()), [buffers_colour(each) for each in range(6)]):
        assert len(set(palette)) == len(palette)


def test_matplotlib_is_left_as_it_was() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    draw_timeline(ring_recording(num_steps=5))
    assert dict(matplotlib.rcParams) == before

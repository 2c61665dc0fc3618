"""A model's timeline as its user sees it: :class:`Timeline`, on the recorder that the engine tells.

Any thread may call it, while requests run and after the engine has ended.
"""

from pathlib import Path

from gapless.timeline.recorder import TimelineRecorder, TimelineTotals
from gapless.timeline.saving import save
from gapless.timeline.spans import Recording
from gapless.timeline.summary import TimelineSummary, summarise

__all__ = ["Timeline"]


class Timeline:
    """What every step did and when, of the newest steps, and sums over all of them.

    ::

        with LLM("smollm2", timeline=True) as llm:
            llm.generate(prompts)
            print(llm.timeline.summary().idle_share)
            llm.timeline.save("timeline.png")

    Args:
        recorder: of the engine.
    """

    def __init__(self, recorder: TimelineRecorder) -> None:
        self._recorder = recorder

    def recording(self, first_step: int = 0) -> Recording:
        """The steps that the memory holds, from ``first_step`` on."""
        return self._recorder.recording(first_step)

    def summary(self) -> TimelineSummary:
        """These steps in numbers: device-active share, idle time by cause, share of the roofline, advice on depth."""
        return summarise(self.recording())

    def totals(self) -> TimelineTotals:
        """Sums since the engine started, cheap to ask for."""
        return self._recorder.totals()

    def save(self, path: str | Path, *, zoom: int | None = None) -> None:
        """Write a picture (``.png``, ``.svg``), a trace for ui.perfetto.dev (``.trace.json``) or numbers (``.json``).

        Args:
            path: where to; its suffix chooses.
            zoom: in a picture, number of the first step to show close up; ``None`` takes steps that stand for the run.

        Raises:
            ConfigError: the suffix, the folder or ``zoom`` is wrong, or there is no step to draw.
            OSError: the disk is full, or the like.
        """
        save(self.recording(), path, zoom=zoom)

    def clear(self) -> None:
        """Forget the steps so far, such as those of a warm-up; the sums go on."""
        self._recorder.clear()

    def measure_read_bandwidth(self) -> float:
        """Measure how fast the device reads, in bytes a second; shares of the roofline need it.

        Takes some tenths of a second, while no request runs.

        Raises:
            GaplessError: steps are in flight, or too little memory is free.
        """
        return self._recorder.measure_read_bandwidth()

"""A stop check over ids instead of text: :class:`PairJudge`, which ends a request at a pair of ids, perhaps late.

It stands for stop strings in the simulation, which has no text. A late verdict is what a tokenizer causes that makes
text of a byte only when the bytes after it are known. :func:`judged` is what such a request must give.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gapless.engine.stop_check import StopMatch
from simulation.solo import SoloOutput

__all__ = ["JudgeMaker", "PairJudge", "judged", "judged_text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeMaker:
    """Makes a request's judges.

    Attributes:
        pair: what ends the request, once both ids stand side by side.
        late: how many tokens later that is noticed.
        min_tokens: pairs completed before do not count.
    """

    pair: tuple[int, int]
    late: int = 0
    min_tokens: int = 0

    def __call__(self) -> "PairJudge":
        """Make one."""
        return PairJudge(self)


class PairJudge:
    """A :class:`gapless.engine.stop_check.StopCheck`. Its text is the ids, each followed by a space."""

    def __init__(self, maker: JudgeMaker) -> None:
        self._maker = maker
        self._ids: list[int] = []
        self._num_told = 0
        self._ended = False

    @property
    def num_settled_ids(self) -> int:
        """Ids that are old enough to be judged."""
        match = self._match(self._num_judged)
        return self._num_judged if match is None else match.num_ids

    def append(self, token_id: int) -> StopMatch | None:
        """Take an id."""
        assert not self._ended
        self._ids.append(token_id)
        return self._match(self._num_judged)

    def end(self) -> StopMatch | None:
        """No more ids come."""
        self._ended = True
        return self._match(len(self._ids))

    def take_text(self) -> str:
        """The ids that were judged since the last call, without the pair."""
        match = self._match(self._num_judged)
        # The last id that was judged may begin a pair.
        safe = self._num_judged - (not self._ended) if match is None else match.num_ids - 2
        told, self._num_told = self._num_told, max(safe, self._num_told)
        return "".join(f"{token_id} " for token_id in self._ids[told : self._num_told])

    @property
    def _num_judged(self) -> int:
        return len(self._ids) if self._ended else max(len(self._ids) - self._maker.late, 0)

    def _match(self, num_judged: int) -> StopMatch | None:
        for end in range(max(2, self._maker.min_tokens), num_judged + 1):
            if tuple(self._ids[end - 2 : end]) == self._maker.pair:
                return StopMatch("{} {}".format(*self._maker.pair), end)
        return None


def judged(output: SoloOutput, maker: JudgeMaker) -> SoloOutput:
    """What remains of ``output`` when a judge has seen it."""
    judge = maker()
    ended_by_token = output.finish_reason == "stop"
    match = None
    for token_id in output.token_ids[: len(output.token_ids) - ended_by_token]:
        match = judge.append(token_id)
        if match is not None:
            break
    noticed = match is not None
    match = judge.end()
    text = judge.take_text()
    if match is None:
        return replace(output, text=text)
    ids = output.token_ids[: match.num_ids]
    if output.finish_reason == "error" and not noticed:
        return replace(output, token_ids=ids, text=text)
    return SoloOutput(token_ids=ids, finish_reason="stop", stop_reason=match.stop, text=text)


def judged_text(token_ids: Sequence[int], maker: JudgeMaker) -> str:
    """The text of ids with which a request was ended from outside: what was held back comes too."""
    judge = maker()
    for token_id in token_ids:
        if judge.append(token_id) is not None:
            break
    judge.end()
    return judge.take_text()

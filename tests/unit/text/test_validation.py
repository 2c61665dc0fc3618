"""Token ids and text that a caller hands in."""

import json
from typing import Any

import numpy as np
import pytest

from gapless.errors import RequestError
from gapless.text.validation import check_text, check_token_ids


@pytest.mark.parametrize("bad", [True, False, 1.0, float("nan"), -1, 320, 2**31, 2**63, 2**200, "1", None, [1]])
def test_c25_a_bad_id_is_named_with_its_field_and_place(bad: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check_token_ids([5, 6, bad], 320, field="prompts[4]")
    assert str(caught.value).startswith("prompts[4][2]=" + repr(bad)[:20])
    assert "\n" not in str(caught.value)


def test_c25_the_message_names_the_limit() -> None:
    with pytest.raises(RequestError, match=r"prompt_token_ids\[0\]=320 .*0 to 319"):
        check_token_ids([320], 320)


@pytest.mark.parametrize("bad", ["12", b"12", 5, None, {1: 2}, {1}])
def test_c25_not_a_list_of_ids(bad: Any) -> None:
    with pytest.raises(RequestError, match="prompt_token_ids"):
        check_token_ids(bad, 320)


def test_c25_ids_at_the_edges() -> None:
    ids = check_token_ids((0, 319, np.int64(7)), 320)
    assert ids == [0, 319, 7]
    assert json.dumps(ids) == "[0, 319, 7]"  # plain integers, whatever came in


def test_c40_no_ids() -> None:
    with pytest.raises(RequestError, match=r"prompts\[0\] is empty"):
        check_token_ids([], 320, field="prompts[0]")


def test_text() -> None:
    assert check_text("\U0001f600 \x00", field="stop") == "\U0001f600 \x00"
    with pytest.raises(RequestError, match=r"stop.*U\+D83D at character 3"):
        check_text("abc\ud83d", field="stop")
    with pytest.raises(RequestError, match=r"stop=3 .*int"):
        check_text(3, field="stop")

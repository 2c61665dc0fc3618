"""From requests to prompts over HTTP: BOS, templates, empty and long prompts, whose defaults count."""

import asyncio
import cProfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fixtures.api_server import ApiServer
from fixtures.tokenizers import CHATML, LLAMA2_CHAT, save_byte_tokenizer
from gapless.errors import RequestError
from gapless.server.endpoints.limited_threads import LimitedThreads
from gapless.server.endpoints.prompting import ChatPrompter
from gapless.text.byte_tokenizer import ByteTokenizer

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
BOS = 256


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_c35_one_bos_everywhere(bos_server: ApiServer) -> None:
    # The template writes BOS itself: one, and none is added.
    chat = bos_server.ok("/tokenize", messages=user("Hi"))["tokens"]
    assert chat == [BOS, *b"[INST] Hi [/INST]"]
    rendered = "<s>[INST] Hi [/INST]"
    assert bos_server.ok("/tokenize", prompt=rendered)["tokens"] == chat
    assert bos_server.ok("/tokenize", prompt="Hi")["tokens"] == [BOS, *b"Hi"]
    assert bos_server.ok("/tokenize", prompt="Hi", add_special_tokens=False)["tokens"] == [*b"Hi"]
    usage = bos_server.ok(CHAT, messages=user("Hi"))["usage"]
    assert usage["prompt_tokens"] == len(chat)
    for prompt, count in ((rendered, len(chat)), ("Hi", 3)):
        assert bos_server.complete(prompt)["usage"]["prompt_tokens"] == count
    assert bos_server.complete("Hi", add_special_tokens=False)["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(("fixture", "template"), [("server", CHATML), ("bos_server", LLAMA2_CHAT)])
def test_c35_a_chat_has_the_ids_of_transformers(
    request: pytest.FixtureRequest, tmp_path: Path, fixture: str, template: str, add_generation_prompt: bool
) -> None:
    """Templates with and without BOS; that one has no header for the answer makes no difference."""
    api: ApiServer = request.getfixturevalue(fixture)
    theirs = AutoTokenizer.from_pretrained(
        save_byte_tokenizer(tmp_path, add_bos=fixture == "bos_server", chat_template=template)
    )
    messages = [*user("Hi é"), {"role": "assistant", "content": "x "}, *user("  bye")]
    ids = theirs.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, return_dict=False)
    options = {"messages": messages, "add_generation_prompt": add_generation_prompt}
    assert api.ok("/tokenize", **options)["tokens"] == ids
    assert api.ok(CHAT, **options, max_tokens=1)["usage"]["prompt_tokens"] == len(ids)
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
    assert api.ok("/tokenize", prompt=rendered)["tokens"] == ids
    assert api.complete(rendered, max_tokens=1)["usage"]["prompt_tokens"] == len(ids)
    assert api.complete(ids, max_tokens=1)["usage"]["prompt_tokens"] == len(ids)


def test_c35_typed_control_text_stays_text(server: ApiServer) -> None:
    tokens = server.ok("/tokenize", messages=user("a<|im_end|>b"))["tokens"]
    assert tokens.count(259) == 1  # the template's own
    assert bytes(t for t in tokens if t < 256).count(b"<|im_end|>") == 1
    # In a raw prompt whoever writes it is in charge.
    assert server.ok("/tokenize", prompt="a<|im_end|>b")["tokens"] == [ord("a"), 259, ord("b")]
    assert server.ok("/tokenize", prompt="L", return_token_strs=True)["token_strs"] == ["L"]


def test_c35_tokens_there_and_back(server: ApiServer) -> None:
    text = "naïve 🙂 <|im_start|>"
    tokens = server.ok("/tokenize", prompt=text)["tokens"]
    assert server.ok("/detokenize", tokens=tokens)["prompt"] == text
    assert server.ok("/detokenize", tokens=tokens, skip_special_tokens=True)["prompt"] == "naïve 🙂 "
    assert server.ok("/detokenize", tokens=[])["prompt"] == ""


def test_c36_without_a_template_only_completions_work(hist_server: ApiServer) -> None:
    for path, fields in ((CHAT, {"messages": user("x")}), ("/v1/responses", {"input": "x"})):
        for stream in (False, True):
            reply = hist_server.post(path, stream=stream, **fields)
            assert reply.status == 400
            assert "no chat template" in reply.error["message"]
    assert hist_server.complete("abc", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_c36_a_template_refuses_in_its_own_words(bos_server: ApiServer) -> None:
    messages = [{"role": "system", "content": "Be kind"}, *user("x")]
    for stream in (False, True):
        reply = bos_server.post(CHAT, messages=messages, stream=stream)
        assert reply.status == 400
        assert "System role not supported" in reply.error["message"]
    assert bos_server.ok(CHAT, messages=user("x"))["choices"][0]["message"]["content"].startswith("x")


@pytest.mark.parametrize("messages", [[], [{"role": "wizard", "content": "x"}], [{"role": "user"}]])
def test_c36_messages_that_are_none(server: ApiServer, messages: list[Any]) -> None:
    reply = server.post(CHAT, messages=messages)
    assert reply.status == 400
    assert reply.error["param"].startswith("messages")
    server.assert_serves()


@pytest.mark.parametrize(
    ("prompt", "param"),
    [("", "prompt"), ([""], "prompt[0]"), ([], "prompt"), ([[]], "prompt[0]"), (["L", ""], "prompt[1]"),
     ([[76], []], "prompt[1]")],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_c40_an_empty_prompt(server: ApiServer, prompt: Any, param: str, stream: bool) -> None:
    reply = server.post(TEXT, prompt=prompt, stream=stream)
    assert reply.status == 400
    assert reply.error["param"] == param
    assert reply.error["message"].startswith(param)
    server.assert_serves()


@pytest.mark.parametrize(
    ("prompts", "param"),
    [
        (["Q", "", "Q"], "prompt[1]"),
        ([[81], [81], []], "prompt[2]"),
        ([[81], [320]], "prompt[1][0]"),
        (["Q", "Q" * 300], "prompt[1]"),
        (["Q", 81], "prompt[1]"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_c40_nothing_of_a_list_with_a_bad_prompt_is_run(
    server: ApiServer, prompts: list[Any], param: str, stream: bool
) -> None:
    assert server.wait_until_idle()
    before = server.counters()
    reply = server.post(TEXT, prompt=prompts, stream=stream, max_tokens=200)
    assert reply.status == 400
    assert reply.error["param"] == param
    # Asked for behind whatever the request had sent to the engine.
    after = server.counters()
    assert (after.running, after.waiting, after.steps, after.output_tokens) == (
        0,
        0,
        before.steps,
        before.output_tokens,
    )
    server.assert_serves()


def test_c40_an_empty_prompt_starts_from_bos(bos_server: ApiServer) -> None:
    content = bos_server.complete("")
    assert content["usage"]["prompt_tokens"] == 1
    assert content["choices"][0]["text"] == "xyz"
    assert [choice["text"] for choice in bos_server.complete(["", ""])["choices"]] == ["xyz", "xyz"]
    for prompt in ([], [[]]):
        assert bos_server.post(TEXT, prompt=prompt).status == 400


def test_c40_white_space_is_a_prompt(server: ApiServer) -> None:
    assert server.complete("   ", max_tokens=1)["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("length", [257, 5000])
@pytest.mark.parametrize("stream", [False, True])
def test_c41_a_prompt_that_is_too_long(server: ApiServer, length: int, stream: bool) -> None:
    for prompt in ("a" * length, [97] * length):
        reply = server.post(TEXT, prompt=prompt, stream=stream)
        assert reply.status == 400
        assert reply.headers["content-type"] == "application/json", "before a stream has begun"
        assert reply.error["code"] == "context_length_exceeded"
        assert reply.error["param"] == "prompt"
        assert str(length) in reply.error["message"]
        assert "256" in reply.error["message"]
    reply = server.post(CHAT, messages=user("a" * length), stream=stream)
    assert reply.status == 400
    assert reply.error["param"] == "messages"
    server.assert_serves()


def test_c41_one_of_a_list_is_too_long(server: ApiServer) -> None:
    reply = server.post(TEXT, prompt=["a", "b", "c", "d" * 300])
    assert reply.status == 400
    assert reply.error["param"] == "prompt[3]"
    server.assert_serves()


def test_c41_a_prompt_that_just_fits(server: ApiServer) -> None:
    content = server.complete("Q" * 256, max_tokens=10)
    assert content["usage"]["total_tokens"] == 257  # the last token is never fed back
    assert content["choices"][0]["finish_reason"] == "length"


def test_c59_the_request_comes_before_the_file(bos_server: ApiServer) -> None:
    """The file says top_k 1, temperature 2 and three tokens."""

    def texts(**fields: Any) -> set[str]:
        content = bos_server.ok(TEXT, prompt=["L"] * 2, n=60, max_tokens=1, seed=1, **fields)
        return {choice["text"] for choice in content["choices"]}

    assert texts() == {"x"}
    assert texts(temperature=2) == {"x"}
    assert texts(top_k=-1) == {"x", "y", "z"}
    assert texts(top_k=0, temperature=1.0) == {"x", "y", "z"}
    assert texts(top_k=2) == {"x", "y"}
    assert texts(top_k=0, temperature=0) == {"x"}


def test_c59_max_tokens_of_the_file(bos_server: ApiServer) -> None:
    assert bos_server.complete("L")["usage"]["completion_tokens"] == 3
    assert bos_server.ok(CHAT, messages=user("x"))["usage"]["completion_tokens"] == 3
    assert bos_server.ok("/v1/responses", input="x")["usage"]["output_tokens"] == 3
    assert bos_server.complete("L", max_tokens=16)["usage"]["completion_tokens"] == 16
    assert bos_server.ok(CHAT, messages=user("x"), max_tokens=5)["usage"]["completion_tokens"] == 5


def test_c59_the_operator_comes_before_the_file(hist_server: ApiServer) -> None:
    """The file says top_k 1, the operator -1."""
    content = hist_server.ok(TEXT, prompt="abc", n=40, max_tokens=1, temperature=5, logprobs=0, seed=1)
    assert len({choice["logprobs"]["tokens"][0] for choice in content["choices"]}) > 5
    content = hist_server.ok(TEXT, prompt="abc", n=40, max_tokens=1, temperature=5, top_k=1, logprobs=0, seed=1)
    assert len({choice["logprobs"]["tokens"][0] for choice in content["choices"]}) == 1


def test_c59_built_in_defaults(server: ApiServer) -> None:
    assert server.ok(TEXT, prompt="Q")["usage"]["completion_tokens"] == 16


# --- templates that do not behave ---------------------------------------------------------------------------------

BOMB = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
FLOOD = "{% for a in range(50000) %}{{ messages[0].content }}{% endfor %}"


def test_a_template_without_end_is_cut() -> None:
    asyncio.run(_a_template_without_end_is_cut())


async def _a_template_without_end_is_cut() -> None:
    threads = LimitedThreads(num_threads=1, limit_s=0.2)
    prompter = ChatPrompter(ByteTokenizer(chat_template=BOMB), max_model_len=512, threads=threads)
    how: dict[str, Any] = {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "template_variables": None,
    }
    with pytest.raises(RequestError, match=r"messages keeps the chat template busy for more than 0\.2 s"):
        await prompter.prepare(user("x"), **how)
    # The only thread is free again.
    good = ChatPrompter(ByteTokenizer(), max_model_len=512, threads=threads)
    assert (await good.prepare(user("x"), **how)).token_ids


def test_a_template_that_writes_too_much_is_refused() -> None:
    asyncio.run(_a_template_that_writes_too_much_is_refused())


async def _a_template_that_writes_too_much_is_refused() -> None:
    prompter = ChatPrompter(ByteTokenizer(chat_template=FLOOD), max_model_len=10**6, max_rendered_characters=100_000)
    with pytest.raises(RequestError, match="messages makes a prompt of 500000 characters"):
        await prompter.prepare(
            user("x" * 10), add_generation_prompt=True, continue_final_message=False, template_variables=None
        )


@pytest.mark.timeout(30)
def test_a_profiler_works_after_work_with_a_limit() -> None:
    threads = LimitedThreads(num_threads=1, limit_s=0.2)

    def without_end() -> None:
        while True:
            pass

    async def both() -> int:
        with pytest.raises(TimeoutError):
            await threads.run(without_end)
        return await threads.run(lambda: 5)

    assert asyncio.run(both()) == 5
    profiler = cProfile.Profile()
    assert profiler.runcall(lambda: sum(range(3))) == 3
    assert profiler.getstats()


def test_work_that_was_given_up_ends() -> None:
    asyncio.run(_work_that_was_given_up_ends())


async def _work_that_was_given_up_ends() -> None:
    threads = LimitedThreads(num_threads=1, limit_s=60)
    ended = threading.Event()

    def work() -> None:
        try:
            while True:
                time.sleep(0.001)
        finally:
            ended.set()

    task = asyncio.ensure_future(threads.run(work))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, 10)
    assert await threads.run(lambda: 5) == 5


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ raise_exception('turns must alternate') }}", "turns must alternate"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_c36_whatever_a_template_does_is_the_requests_error(template: str, words: str) -> None:
    prompter = ChatPrompter(ByteTokenizer(chat_template=template), max_model_len=512)
    with pytest.raises(RequestError, match=words):
        asyncio.run(
            prompter.prepare(
                user("x"), add_generation_prompt=True, continue_final_message=False, template_variables=None
            )
        )


def test_c36_what_templates_may_use() -> None:
    template = (
        "{{ strftime_now('%Y') }}{% for message in messages %}{% if loop.previtem is defined %}, {% endif %}"
        "{{ message | tojson }}{% endfor %}{{ thinking }}"
    )
    prompter = ChatPrompter(ByteTokenizer(chat_template=template), max_model_len=512)
    prompt = asyncio.run(
        prompter.prepare(
            user("x") * 2,
            add_generation_prompt=True,
            continue_final_message=False,
            template_variables={"thinking": "no"},
        )
    )
    message = '{"role": "user", "content": "x"}'
    assert bytes(prompt.token_ids).decode() == f"{time.strftime('%Y')}{message}, {message}no"

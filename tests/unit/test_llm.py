"""``LLM``: what goes in, what comes out, and how it lives and ends."""

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import gapless
from fixtures.served_models import CPU, GREEDY, chain, rows, table_checkpoint
from fixtures.tokenizers import BYTE_BOS, BYTE_EOS, BYTE_IM_END, BYTE_IM_START, CHATML, CHATML_WITH_BOS
from gapless import LLM, EngineConfig, SamplingParams
from gapless.errors import ConfigError, EngineDeadError, GaplessError, RequestError
from gapless.model.decoder import DecoderModel
from gapless.served_model import EngineOptions

# From `a` to `e` and the end; `S` goes on for ever.
SCRIPT = (chain(*"abcde", BYTE_EOS), rows(S={"S": 5.0}), chain("\n", *"ok", BYTE_EOS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_checkpoint(
        tmp_path_factory.mktemp("table"), *SCRIPT, chat_template=CHATML, max_position_embeddings=4096
    )


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **CPU) as made:
        yield made


def text_of(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> str:
    return llm.generate(prompt, params)[0].outputs[0].text


def wait_until(holds: Any, timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.005)


def test_the_front_door_shows_what_it_says() -> None:
    assert {"LLM", "AsyncLLM", "SamplingParams", "RequestOutput", "CompletionOutput", "errors"} <= set(gapless.__all__)
    assert gapless.errors.GaplessError is GaplessError
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        gapless.LLMs  # noqa: B018
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'version = "{gapless.__version__}"' in project


def test_options_are_those_of_the_config_and_an_unknown_one_is_named(folder: Path) -> None:
    assert set(EngineOptions.__annotations__) == set(EngineConfig.__dataclass_fields__)
    with pytest.raises(ConfigError, match="unknown option 'dept'"):
        LLM(folder, dept=3)  # type: ignore[call-arg]


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    outputs = llm.generate(["c", "a", "e", "b"], GREEDY)
    assert [output.outputs[0].text for output in outputs] == ["de", "bcde", "", "cde"]
    assert [output.prompt for output in outputs] == ["c", "a", "e", "b"]
    assert all(output.finished and output.outputs[0].finish_reason == "stop" for output in outputs)
    assert outputs[0].outputs[0].token_ids == [*b"de", BYTE_EOS]
    assert outputs[0].outputs[0].stop_reason is None
    metrics = outputs[0].metrics
    assert metrics is not None
    assert metrics.ttft_s is not None
    assert metrics.ttft_s > 0


@pytest.mark.parametrize(
    "prompt", ["a", [97], {"prompt": "a"}, {"prompt_token_ids": [97]}, {"prompt": "shown", "prompt_token_ids": [97]}]
)
def test_a_prompt_may_have_any_form_alone_and_in_a_list(llm: LLM, prompt: Any) -> None:
    [alone] = llm.generate(prompt, GREEDY)
    [first, second] = llm.generate([prompt, "b"], GREEDY)
    assert alone.outputs[0].text == first.outputs[0].text == "bcde"
    assert alone.prompt_token_ids == [97]
    assert second.outputs[0].text == "cde"
    assert alone.prompt == (
        prompt if isinstance(prompt, str) else dict(prompt).get("prompt") if prompt != [97] else None
    )


def test_each_prompt_may_have_params_of_its_own(llm: LLM) -> None:
    outputs = llm.generate(["a", "a"], [SamplingParams(temperature=0, max_tokens=n) for n in (1, 3)])
    assert [output.outputs[0].text for output in outputs] == ["b", "bcd"]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]
    with pytest.raises(RequestError, match=r"sampling_params has 1 items for 2 prompts"):
        llm.generate(["a", "a"], [GREEDY])
    with pytest.raises(RequestError, match=r"sampling_params\[1\] must be SamplingParams, not dict"):
        llm.generate(["a", "a"], [GREEDY, {}])  # type: ignore[list-item]


def test_a_seed_in_one_object_is_the_seed_of_a_list_of_one(llm: LLM) -> None:
    params = SamplingParams(temperature=5.0, seed=7, max_tokens=8, ignore_eos=True)
    [one] = llm.generate("a", params)
    [listed] = llm.generate(["a"], [params])
    assert one.outputs[0].token_ids == listed.outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (5, "prompts=5 must be a string"),
        (["a", 5], r"prompts\[1\]=5 must be a string"),
        (["a", b"b"], r"prompts\[1\]=b'b' must be a string"),
        ([{"prompt": "a"}, {"text": "a"}], r"prompts\[1\] has the unknown key 'text'"),
        ([{}], r"prompts\[0\] has neither 'prompt' nor 'prompt_token_ids'"),
        (["a\ud83d"], r"prompts\[0\] holds a lone surrogate"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, GREEDY)
    assert text_of(llm, "a") == "bcde"


def test_chat_renders_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    [one] = llm.chat(conversation, GREEDY)
    outputs = llm.chat([conversation, conversation], GREEDY)
    assert one.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert [output.outputs[0].text for output in [one, *outputs]] == ["ok"] * 3
    with pytest.raises(RequestError, match=r"conversations\[1\]: messages is empty"):
        llm.chat([conversation, []], GREEDY)
    with pytest.raises(RequestError, match="messages is empty"):
        llm.chat([], GREEDY)


def test_ids_alone_when_no_text_is_wanted(llm: LLM) -> None:
    [output] = llm.generate("a", SamplingParams(temperature=0, detokenize=False, max_tokens=2))
    assert output.outputs[0].text == ""
    assert output.outputs[0].token_ids == [*b"bc"]


def test_the_progress_bar_goes_to_standard_error(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a"] * 3, GREEDY)
    assert capsys.readouterr() == ("", ""), "there is no terminal"
    llm.generate("S", SamplingParams(temperature=0, max_tokens=2000), use_tqdm=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "generating" in err


def test_threads_get_their_own_results(llm: LLM) -> None:
    def ask(index: int) -> list[str]:
        prompts = ["abcd"[(index + shift) % 4] for shift in range(5)]
        outputs = llm.generate(prompts, GREEDY)
        assert [output.prompt for output in outputs] == prompts
        return [prompt + output.outputs[0].text for prompt, output in zip(prompts, outputs, strict=True)]

    with ThreadPoolExecutor(8) as pool:
        for texts in pool.map(ask, range(40)):
            assert all("abcde".endswith(text) for text in texts)


def test_c05_it_starts_idle_and_wakes_up_again(folder: Path) -> None:
    with LLM(folder, **CPU) as llm:
        for _ in range(2):
            time.sleep(1.0)
            began_s = time.perf_counter()
            assert text_of(llm, "a") == "bcde"
            assert time.perf_counter() - began_s < 1.0


def test_c05_a_dead_engine_tells_every_waiter_and_newcomer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = DecoderModel.forward
    broken = threading.Event()

    def breaks(self: DecoderModel, *arguments: Any) -> Any:
        if broken.is_set():
            raise ArithmeticError("a made-up fault")
        return forward(self, *arguments)

    monkeypatch.setattr(DecoderModel, "forward", breaks)
    endless = SamplingParams(temperature=0, max_tokens=None)
    with LLM(folder, **CPU) as llm:
        with ThreadPoolExecutor(5) as pool:
            waiters = [pool.submit(llm.generate, "S", endless) for _ in range(5)]
            wait_until(lambda: llm.counters().running + llm.counters().waiting > 0)
            broken.set()
            broke_s = time.perf_counter()
            errors = [waiter.exception(timeout=5) for waiter in waiters]
            assert time.perf_counter() - broke_s < 1.0
        with pytest.raises(EngineDeadError, match="a made-up fault") as newcomer:
            llm.generate("a", GREEDY)
    for error in [*errors, newcomer.value]:
        assert isinstance(error, EngineDeadError)
        assert isinstance(error.__cause__, ArithmeticError)
    assert len({id(error) for error in errors}) == 5, "tracebacks of one error would pile up"


def test_c65_ctrl_c_frees_the_blocks_and_the_object_lives_on(llm: LLM) -> None:
    before = llm.counters()
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupt = threading.Thread(
            target=lambda: (wait_until(lambda: llm.counters().running), os.kill(os.getpid(), signal.SIGINT))
        )
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["S"] * 3, SamplingParams(temperature=0, max_tokens=None))
        interrupt.join()
    finally:
        signal.signal(signal.SIGINT, old)
    after = llm.counters()
    assert after.used_blocks == 0
    assert after.running == after.waiting == 0
    assert after.aborted - before.aborted == 3
    assert text_of(llm, "a") == "bcde"


def test_c65_no_signal_handler_is_installed(folder: Path) -> None:
    def handlers() -> dict[int, Any]:
        return {number: signal.getsignal(number) for number in signal.valid_signals()}

    before = handlers()
    with LLM(folder, **CPU) as llm:
        llm.generate("a", GREEDY)
        assert handlers() == before
    assert handlers() == before


@pytest.mark.parametrize("how", ["del", "close", "with"])
def test_c65_threads_and_memory_go_with_the_object(folder: Path, how: str) -> None:
    gc.collect()
    earlier = set(threading.enumerate())  # of other tests; they may end meanwhile
    gc.disable()  # memory must not wait for the collector
    try:
        llm = LLM(folder, **CPU)
        llm.generate("a", GREEDY)
        built = llm._built
        assert built is not None
        weights = weakref.ref(built.loaded.model)
        del built
        assert set(threading.enumerate()) - earlier
        if how == "del":
            del llm
        elif how == "close":
            llm.close()
            llm.close()
        else:
            with llm:
                pass
        assert weights() is None
        wait_until(lambda: earlier.issuperset(threading.enumerate()))
    finally:
        gc.enable()
    if how != "del":
        with pytest.raises(EngineDeadError, match="closed"):
            llm.generate("a", GREEDY)


def test_closing_ends_calls_of_other_threads(folder: Path) -> None:
    llm = LLM(folder, **CPU)
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(llm.generate, "S", SamplingParams(temperature=0, max_tokens=None))
        wait_until(lambda: llm.counters().running)
        llm.close()
        assert waiter.result(timeout=2)[0].outputs[0].finish_reason in {"abort", "length"}


def test_a_failing_start_leaves_no_thread(tmp_path: Path) -> None:
    earlier = set(threading.enumerate())
    table_checkpoint(tmp_path, *SCRIPT, tokenizer=False)
    with pytest.raises(GaplessError, match="has no tokenizer"):
        LLM(tmp_path, **CPU)
    wait_until(lambda: earlier.issuperset(threading.enumerate()))


@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_BOS])
def test_c35_one_bos_and_typed_control_text_stays_text(tmp_path: Path, template: str) -> None:
    table_checkpoint(tmp_path, *SCRIPT, add_bos=True, chat_template=template)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    with LLM(tmp_path, **CPU) as llm:
        for add in (True, False):
            [chat] = llm.chat(conversation, GREEDY, add_generation_prompt=add)
            wanted = reference.apply_chat_template(conversation, tokenize=True, add_generation_prompt=add)["input_ids"]
            assert chat.prompt_token_ids == wanted
            assert chat.prompt_token_ids.count(BYTE_BOS) == (template == CHATML_WITH_BOS)
        [rendered] = llm.generate(llm.tokenizer.render_chat(conversation), GREEDY)
        assert rendered.prompt_token_ids.count(BYTE_BOS) == 1
        assert llm.generate("a", GREEDY)[0].prompt_token_ids == [BYTE_BOS, 97]
        [forged] = llm.chat([{"role": "user", "content": "<|im_end|>"}], GREEDY, add_generation_prompt=False)
    assert forged.prompt_token_ids.count(BYTE_IM_END) == 1
    user = forged.prompt_token_ids.index(BYTE_IM_START) + len("user\n") + 1
    assert bytes(forged.prompt_token_ids[user : user + 10]) == b"<|im_end|>"


def test_c39_an_id_of_the_padded_vocabulary_has_no_text(tmp_path: Path) -> None:
    table_checkpoint(tmp_path, chain("A", "a", 300, "b", BYTE_EOS))
    with LLM(tmp_path, **CPU) as llm:
        for output in llm.generate(["A"] * 4, GREEDY):
            assert output.outputs[0].text == "ab"
            assert output.outputs[0].token_ids == [97, 300, 98, BYTE_EOS]


def test_c40_empty_prompts(llm: LLM, tmp_path: Path) -> None:
    assert llm.generate([]) == []
    for bad, name in (("", "prompt"), ([""], r"prompts\[0\]"), (["a", ""], r"prompts\[1\]"), ([[]], r"prompts\[0\]")):
        with pytest.raises(ValueError, match=f"^{name}.* empty"):
            llm.generate(bad, GREEDY)
        assert text_of(llm, "a") == "bcde"
    steps = llm.counters().steps
    with pytest.raises(ValueError, match=r"prompts\[3\]"):
        llm.generate(["a", "a", "a", ""], GREEDY)
    time.sleep(0.1)
    assert llm.counters().steps == steps, "nothing of the list runs"
    assert text_of(llm, " \n") == "ok"
    table_checkpoint(tmp_path, chain(BYTE_BOS, "h", BYTE_EOS), add_bos=True)
    with LLM(tmp_path, **CPU) as with_bos:
        [output] = with_bos.generate("", GREEDY)
    assert output.prompt_token_ids == [BYTE_BOS]
    assert output.outputs[0].text == "h"


def test_c41_prompts_longer_than_the_context(folder: Path) -> None:
    with LLM(folder, **CPU, max_model_len=64) as llm:
        assert llm.max_model_len == 64
        for length in (65, 5000):
            with pytest.raises(ValueError, match=f"{length} tokens.*max_model_len=64"):
                llm.generate("a" * length, GREEDY)
            assert text_of(llm, "a") == "bcde"
        with pytest.raises(ValueError, match=r"^prompts\[3\]: the prompt has 65 tokens"):
            llm.generate(["a", "b", "c", "a" * 65, "d"], GREEDY)
        [full] = llm.generate("a" * 64, GREEDY)
        assert full.outputs[0].token_ids == [98], "the last position gives one token"
        assert full.outputs[0].finish_reason == "length"

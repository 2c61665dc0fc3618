"""Models by their hub names, against a hub on this machine that speaks the real one's protocol.

The hub's client reads its settings when it is imported, so each setting has a process of its own: most tests share one,
in which each loads a repository that no other test knows.
"""

import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.model_loader import Loader, environment, loader
from e2e.served_process import GAPLESS, served
from fixtures.checkpoints import f_hist_model, save
from fixtures.hub_server import ACCOUNT_WITH_ACCESS, ACCOUNT_WITHOUT_ACCESS, Hub, files_of, running_hub
from fixtures.served_models import chain, table_checkpoint
from fixtures.tokenizers import BYTE_EOS, save_byte_tokenizer
from fixtures.waiting import until

ON_ITS_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); " + GAPLESS[2]
SMALL = ["--device", "cpu", "--num-blocks", "8"]
ANSWER = [ord("b"), ord("c"), BYTE_EOS]
SMALL_FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture(autouse=True)
def no_history(hub: Hub) -> Iterator[None]:
    hub.forget()
    yield
    hub.break_down(status=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_checkpoint(tmp_path_factory.mktemp("model") / "model", chain("a", "b", "c", BYTE_EOS))


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, bytes]:
    return files_of(folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def models(hub: Hub, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    log = tmp_path_factory.mktemp("log") / "log"
    with loader(hub, home, log) as models:
        yield models
    # Standard error is no terminal: nothing of a download is shown there but what went wrong with it.
    assert "%" not in log.read_text()
    assert "Traceback" not in log.read_text()


def weights_read(hub: Hub) -> list[str]:
    return [name for name in hub.files_read() if name.endswith(".safetensors")]


def cached_weights(home: Path, repository: str) -> list[Path]:
    folder = home / "hub" / f"models--{repository.replace('/', '--')}"
    return [*folder.glob("snapshots/*/*.safetensors"), *folder.glob("blobs/*.incomplete")]


def test_a_model_by_its_name_is_downloaded_once(hub: Hub, models: Loader, folder: Path) -> None:
    hub.add("org/plain", folder)
    assert models.ids(str(folder)) == models.ids("org/plain") == ANSWER
    assert sorted(hub.files_read()) == sorted({*SMALL_FILES, "model.safetensors"})

    hub.requests.clear()
    assert models.ids("org/plain") == ANSWER
    assert [request.path for request in hub.requests] == ["/api/models/org/plain/revision/main"]
    hub.break_down(status=503)
    assert models.ids("org/plain") == ANSWER


def test_a_revision_is_a_branch_a_tag_or_a_commit(
    hub: Hub, models: Loader, folder: Path, files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add("org/versions", folder)
    older = files_of(table_checkpoint(tmp_path, chain("a", "x", BYTE_EOS)))
    commit = hub.repositories["org/versions"].commit(older, "v1.0", "refs/pr/1")
    assert models.ids("org/versions@v1.0") == [ord("x"), BYTE_EOS]
    assert weights_read(hub) == ["model.safetensors"]
    assert models.ids("org/versions@refs/pr/1") == models.ids(f"org/versions@{commit}") == [ord("x"), BYTE_EOS]
    assert weights_read(hub) == ["model.safetensors"]
    assert models.ids("org/versions") == models.ids("org/versions@main") == ANSWER
    assert models.refusal("org/versions@v2") == (
        f"model='org/versions@v2' has no revision 'v2'; give a branch, a tag or a commit of {hub.address}/org/versions"
    )


def test_shards_are_those_of_the_index(hub: Hub, models: Loader, tmp_path: Path) -> None:
    model = f_hist_model(vocab_size=320)
    save(model, tmp_path, max_shard_size="100KB")
    save_byte_tokenizer(tmp_path)
    files = files_of(tmp_path)
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    assert len(shards) > 2
    hub.add("org/sharded", {**files, "model.safetensors": b"of another model", "extra.safetensors": b""})
    assert models.ids("org/sharded") == models.ids(str(tmp_path))
    assert sorted(weights_read(hub)) == shards

    hub.add("org/half-sharded", {name: data for name, data in files.items() if name != shards[1]})
    hub.requests.clear()
    assert models.refusal("org/half-sharded") == (
        f"model='org/half-sharded': model.safetensors.index.json names {shards[1]!r}, which the repository does not "
        "hold"
    )
    assert weights_read(hub) == []


def test_only_needed_files_are_fetched_and_never_code(
    hub: Hub, models: Loader, home: Path, files: dict[str, bytes]
) -> None:
    other = {
        "modeling_custom.py": b"raise SystemExit('code of a model was run')",
        "pytorch_model.bin": b"pickle",
        "original/consolidated.00.pth": b"pickle",
        "consolidated.safetensors": b"a vendor's layout",
        "onnx/model.onnx": b"onnx",
        "onnx/config.json": b"{}",
        "part/model.safetensors": b"of another part",
        "model.gguf": b"GGUF",
        "trainer_state.json": b"{}",
        "README.md": b"# model",
    }
    template = {"chat_template.jinja": b"{{ messages }}"}
    config = json.loads(files["config.json"]) | {"auto_map": {"AutoModelForCausalLM": "modeling_custom.Model"}}
    hub.add("org/crowded", {**files, **other, **template, "config.json": json.dumps(config).encode()})
    assert models.ids("org/crowded") == ANSWER
    assert set(hub.files_read()) == {*SMALL_FILES, *template, "model.safetensors"}
    cached = (home / "hub" / "models--org--crowded" / "snapshots").rglob("*")
    assert {path.name for path in cached if path.is_file()} == {*SMALL_FILES, *template, "model.safetensors"}


def test_a_shape_alone_needs_no_weights(hub: Hub, models: Loader, folder: Path) -> None:
    hub.add("org/shape", folder)
    assert len(models.ids("org/shape", load_format="dummy")) > 0
    assert set(hub.files_read()) == SMALL_FILES
    assert models.ids("org/shape") == ANSWER
    assert weights_read(hub) == ["model.safetensors"]


def test_one_file_of_weights_may_have_any_name(hub: Hub, models: Loader, files: dict[str, bytes]) -> None:
    weights = files["model.safetensors"]
    small = {name: data for name, data in files.items() if name != "model.safetensors"}
    hub.add("org/odd", {**small, "odd.safetensors": weights})
    assert models.ids("org/odd") == ANSWER
    hub.break_down(status=404)
    assert models.ids("org/odd") == ANSWER


@pytest.mark.parametrize(
    ("name", "changes", "kind", "message"),
    [
        (
            "foreign",
            {"config.json": b'{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}'},
            "UnsupportedModelError",
            "GPT2LMHeadModel",
        ),
        ("quantised", {"quantization_config": {"quant_method": "awq"}}, "UnsupportedModelError", "'awq'"),
        (
            "pickles",
            {"model.safetensors": None, "pytorch_model.bin": b"pickle"},
            "UnsupportedModelError",
            "model='org/pickles' has its weights as pickle only ('pytorch_model.bin'), which can run code and is never "
            "read; take a repository or a revision with safetensors, or convert it",
        ),
        (
            "ggufs",
            {"config.json": None, "model.safetensors": None, "m-Q8_0.gguf": b"GGUF"},
            "CheckpointError",
            "model='org/ggufs' has no config.json; download one of its GGUF files (hf download org/ggufs "
            "'m-Q8_0.gguf') and give that file",
        ),
        (
            "adapter",
            {"config.json": None, "model.safetensors": None, "adapter_model.safetensors": b""},
            "CheckpointError",
            "model='org/adapter' has no config.json; it is no model for gapless",
        ),
        (
            "several",
            {"model.safetensors": None, "a.safetensors": b"a", "b.safetensors": b"b"},
            "CheckpointError",
            "model='org/several' has 2 safetensors files ('a.safetensors', 'b.safetensors') and no "
            "model.safetensors.index.json",
        ),
    ],
)
def test_what_cannot_be_loaded_is_refused_before_its_weights_are_fetched(
    hub: Hub,
    models: Loader,
    files: dict[str, bytes],
    name: str,
    changes: dict[str, Any],
    kind: str,
    message: str,
) -> None:
    changed: dict[str, bytes | None] = {**files, **{path: data for path, data in changes.items() if "." in path}}
    if extra := {key: value for key, value in changes.items() if "." not in key}:
        changed["config.json"] = json.dumps(json.loads(files["config.json"]) | extra).encode()
    hub.add(f"org/{name}", {path: data for path, data in changed.items() if data is not None})
    assert message in models.refusal(f"org/{name}", kind=kind)
    assert set(hub.files_read()) <= SMALL_FILES


def test_who_may_read_a_model(hub: Hub, models: Loader, folder: Path) -> None:
    log_in = "(`hf auth login`, or HF_TOKEN)"
    hub.add("org/gated", folder, access="gated")
    hub.add("org/private", folder, access="private")
    unknown = f"is not at {hub.address}, or is private, which needs a token; check the name, or log in {log_in}"
    assert models.refusal("org/missing") == f"model='org/missing' {unknown}"
    assert models.refusal("org/private") == f"model='org/private' {unknown}"
    foreign = (
        f"is not at {hub.address}, or is private, which the token may not read; check the name, or log in {log_in}"
    )
    assert models.refusal("org/missing", token=ACCOUNT_WITH_ACCESS) == f"model='org/missing' {foreign}"
    assert models.refusal("org/private", token=ACCOUNT_WITHOUT_ACCESS) == f"model='org/private' {foreign}"
    accept = f"accept its terms at {hub.address}/org/gated and log in {log_in}"
    assert models.refusal("org/gated") == f"model='org/gated' is gated, and no token was given; {accept}"
    assert models.refusal("org/gated", token=ACCOUNT_WITHOUT_ACCESS) == (
        f"model='org/gated' is gated, and the account of the token has no access to it; {accept}"
    )
    message = models.refusal("org/gated", token="hf_of_nobody")
    assert message.startswith(f"model='org/gated' was not looked for: {hub.address} refuses the token; ")
    assert "hf_of_nobody" not in message
    hub.break_down(status=403)
    assert models.refusal("org/private") == (
        f"model='org/private' may not be read: {hub.address} says 'this is out of service'; "
        f"give the token that permission, or take another {log_in}"
    )
    hub.break_down(status=None)
    assert hub.files_read() == []

    hub.requests.clear()
    assert models.ids("org/gated", token=ACCOUNT_WITH_ACCESS) == ANSWER
    assert models.ids("org/private", token=ACCOUNT_WITH_ACCESS) == ANSWER
    # The store of large files belongs to somebody else, who must not learn the token.
    tokens = {request.path.startswith("/stored/"): request.token for request in hub.requests}
    assert tokens == {False: ACCOUNT_WITH_ACCESS, True: None}


def test_a_download_that_breaks_off_goes_on(hub: Hub, models: Loader, folder: Path, tmp_path: Path) -> None:
    """The hub's client resumes after a connection that was closed; after others, all that is missing comes anew."""
    large = table_checkpoint(tmp_path, chain("a", "b", "c", BYTE_EOS), vocab_size=704)
    hub.add("org/closed", large)
    hub.cut("model.safetensors", after_bytes=11_000_000)
    assert models.ids("org/closed") == ANSWER
    first_bytes = [request.first_byte for request in hub.requests if request.path.startswith("/stored/")]
    assert len(first_bytes) == 2
    assert 0 == first_bytes[0] < first_bytes[1] <= 11_000_000

    hub.forget()
    hub.add("org/reset", folder)
    hub.cut("model.safetensors", after_bytes=50_000, reset=True)
    hub.fail("tokenizer.json", status=500)
    assert models.ids("org/reset") == ANSWER
    assert sorted(hub.files_read()) == sorted([*SMALL_FILES, "tokenizer.json", *["model.safetensors"] * 2])


def test_a_download_that_fails_leaves_no_broken_model(hub: Hub, models: Loader, home: Path, folder: Path) -> None:
    hub.add("org/broken", folder)
    hub.fail("model.safetensors", status=502, times=2)
    assert models.refusal("org/broken") == (
        f"model='org/broken' could not be taken from {hub.address} (the hub answered with status 502); "
        "try again later, or give a local folder"
    )
    assert weights_read(hub) == ["model.safetensors"] * 2
    assert cached_weights(home, "org/broken") == []
    hub.forget()
    assert models.ids("org/broken") == ANSWER
    assert hub.files_read() == ["model.safetensors"]


def test_a_damaged_download_is_found_by_its_header(hub: Hub, models: Loader, files: dict[str, bytes]) -> None:
    hub.add("org/short", {**files, "model.safetensors": files["model.safetensors"][:-100]})
    assert "model.safetensors is cut short" in models.refusal("org/short")


def read_until(terminal: int, words: str) -> str:
    """Read what a process writes on its terminal until the words come."""
    seen = ""
    deadline_s = time.monotonic() + 60
    while words not in seen:
        left_s = deadline_s - time.monotonic()
        assert select.select([terminal], [], [], max(left_s, 0))[0], f"{words!r} did not come: {seen[-1000:]!r}"
        seen += os.read(terminal, 65536).decode(errors="replace")
    return seen


def gapless(hub: Hub, home: Path, *arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*GAPLESS, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(hub, home, **more),
        check=False,
    )


def test_the_command_ends_with_one_line_where_there_is_no_such_model(hub: Hub, tmp_path: Path) -> None:
    ended = gapless(hub, tmp_path, "generate", "--model", "org/missing@v1", *SMALL, "a")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.splitlines() == [
        "import torch ...",
        "find model ...",
        f"error: model='org/missing@v1' is not at {hub.address}, or is private, which needs a token; "
        "check the name, or log in (`hf auth login`, or HF_TOKEN)",
    ]


def test_the_command_ends_with_one_line_where_there_is_no_hub(hub: Hub, tmp_path: Path) -> None:
    ended = gapless(hub, tmp_path, "generate", "--quiet", "--model", "org/any", *SMALL, "a", HF_ENDPOINT=NOWHERE)
    assert (ended.returncode, ended.stdout) == (1, "")
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"error: model='org/any' is not complete in {tmp_path / 'hub'}, and {NOWHERE} could not be ")
    assert "asked (ConnectError: " in line
    assert line.endswith("check the connection and HF_ENDPOINT, or give a local folder")


def test_ctrl_c_ends_a_download_at_once_and_the_next_command_completes_it(
    hub: Hub, folder: Path, tmp_path: Path
) -> None:
    """First on a terminal, where a bar shows the bytes; then in a pipe, where lines tell of the stages."""
    hub.add("org/interrupted", folder)
    hub.slow_down("model.safetensors", pause_s=0.3)  # minutes for the file
    command = ["generate", "--model", "org/interrupted", "--temperature", "0", *SMALL, "a"]
    terminal, device = pty.openpty()
    termios.tcsetwinsize(device, (40, 120))
    with subprocess.Popen(
        [sys.executable, "-c", ON_ITS_TERMINAL, *command],
        stdin=device,
        stdout=device,
        stderr=device,
        start_new_session=True,
        env={**environment(hub, tmp_path), "TERM": "xterm"},
    ) as process:
        os.close(device)
        try:
            seen = read_until(terminal, "0.0/2.5 MB")
            until(lambda: weights_read(hub))
            os.write(terminal, b"\x03")
            seen += read_until(terminal, "interrupted")
            assert process.wait(60) == 130
        finally:
            process.kill()  # nothing, unless it has failed to end
    os.close(terminal)
    assert "Traceback" not in seen
    assert "trying again" not in seen
    assert cached_weights(tmp_path, "org/interrupted") == []

    hub.forget()
    ended = gapless(hub, tmp_path, *command)
    assert (ended.returncode, ended.stdout) == (0, "bc\n"), ended.stderr
    assert hub.files_read() == ["model.safetensors"]
    lines = ended.stderr.splitlines()
    assert lines[:4] == [
        "import torch ...",
        "find model ...",
        "download ...",
        "org/interrupted: 2.5 MB of weights to come",
    ]
    assert "%" not in "".join(lines[:-1])


def test_a_server_takes_a_downloaded_model_without_the_hub(
    hub: Hub, models: Loader, home: Path, folder: Path, tmp_path: Path
) -> None:
    hub.add("org/served", folder)
    assert models.ids("org/served@main") == ANSWER
    hub.requests.clear()
    settings = environment(hub, home, HF_HUB_OFFLINE="1")
    with served(tmp_path / "log", "org/served@main", *SMALL, "--port", "0", environment=settings) as server:
        server.wait_until_ready()
        status, listed = server.ask("GET", "/v1/models")
        assert (status, [model["id"] for model in listed["data"]]) == (200, ["org/served@main"])
        body = {"model": "org/served@main", "prompt": "a", "temperature": 0}
        status, answer = server.ask("POST", "/v1/completions", body)
        assert (status, answer["choices"][0]["text"]) == (200, "bc")
    assert hub.requests == []

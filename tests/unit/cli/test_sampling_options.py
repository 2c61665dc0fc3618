"""Sampling options on the command line: stops, choices, and whose defaults count."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fixtures.served_models import chain, rows, table_checkpoint
from fixtures.tokenizers import BYTE_EOS, CHATML
from gapless.cli.main import app

FLAT = {chr(token): 1.0 for token in range(0x21, 0x7F)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return table_checkpoint(
        tmp_path,
        chain("a", *"bcdef", BYTE_EOS),
        rows(L={"x": 2.0, "y": 1.0, "z": 0.0}),
        {ord("F"): {ord(after): 1.0 for after in FLAT}},
        chain("\n", *"ok wi", BYTE_EOS),
        chat_template=CHATML,
    )


def call(folder: Path, *arguments: str, command: str = "generate", given: str | None = None) -> Result:
    engine = ["--model", str(folder), "--device", "cpu", "--num-blocks", "64", "--quiet"]
    result = CliRunner().invoke(app, [command, *engine, *arguments], input=given)
    assert result.exit_code == 0, result.output
    return result


def test_stops(folder: Path) -> None:
    assert call(folder, "--raw", "--stop", "zz", "--stop", "de", "a").stdout == "bc\n"
    assert call(folder, "--raw", "--stop", "de", "--include-stop-str-in-output", "a").stdout == "bcde\n"
    record = json.loads(call(folder, "--raw", "--json", "--stop", "de", "a").stdout)
    assert (record["text"], record["stop_reason"], record["finish_reason"]) == ("bc", "de", "stop")
    assert record["token_ids"] == [*b"bcde"]
    assert call(folder, "--stop", " w", command="chat", given="hi\n").stdout == "ok\n"


def test_several_answers(folder: Path) -> None:
    several = ["--raw", "--n", "3", "--temperature", "1", "--seed", "5", "--max-tokens", "1"]
    lines = call(folder, *several, "F").stdout.splitlines()
    assert lines[::2] == ["[0]", "[1]", "[2]"]
    assert len(set(lines[1::2])) > 1
    records = [json.loads(line) for line in call(folder, *several, "--json", "F").stdout.splitlines()]
    assert [record["index"] for record in records] == [0, 1, 2]
    assert [record["text"] for record in records] == lines[1::2]


def test_c59_an_option_wins_over_the_file_and_the_file_over_the_command(folder: Path) -> None:
    def texts(*options: str) -> set[str]:
        shown = call(folder, "--raw", "--json", "--max-tokens", "1", *options, *["L"] * 100).stdout
        return {json.loads(line)["text"] for line in shown.splitlines()}

    assert texts() == {"x"}, "the command is greedy where nobody says anything"
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 1.5, "max_new_tokens": 2}))
    assert texts() == {"x", "y", "z"}
    assert texts("--temperature", "0") == {"x"}
    assert texts("--generation-config", "none") == {"x"}
    assert call(folder, "--raw", "a").stdout == "bc\n"
    assert call(folder, "--raw", "--max-tokens", "4", "a").stdout == "bcde\n"
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 1, "temperature": 1.5}))
    assert texts("--temperature", "2") == {"x"}
    # min_p drops what the other 317 tokens have at this temperature: one in 500 such runs would see one of them.
    assert texts("--temperature", "2", "--top-k", "0", "--min-p", "0.001") == {"x", "y", "z"}


def test_a_line_may_have_stops_and_choices_of_its_own(folder: Path) -> None:
    lines = [{"prompt": "a", "stop": ["d"]}, {"prompt": "a", "stop": "ef", "n": 2}, {"prompt": "a"}]
    given = "\n".join(map(json.dumps, lines))
    records = [json.loads(line) for line in call(folder, "--raw", "--json", "-i", "-", given=given).stdout.splitlines()]
    assert [record["text"] for record in records] == ["bc", "bcd", "bcd", "bcdef"]
    assert [record.get("index") for record in records] == [None, 0, 1, None]


def test_help_shows_the_defaults_of_the_command() -> None:
    shown = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "200"}).stdout
    chat = CliRunner().invoke(app, ["chat", "--help"], env={"COLUMNS": "200"}).stdout

    def default_of(option: str, page: str) -> str:
        paragraph = " ".join(page.partition(f" --{option} ")[2].partition(" --")[0].split())
        return paragraph.partition("[default: ")[2].partition("]")[0]

    assert [default_of(name, shown) for name in ("temperature", "max-tokens", "top-p")] == ["0.0", "256", "1.0"]
    assert [default_of(name, chat) for name in ("temperature", "max-tokens", "top-p")] == ["0.7", "1024", "0.95"]
    assert "--n " not in chat

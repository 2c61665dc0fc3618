"""The evaluation harness ``lm_eval`` against the server: scores that are known by hand come out as they should."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fixtures.api_server import MODEL, ApiServer
from fixtures.served_models import ROW_L, chain, rows, table_checkpoint
from fixtures.tokenizers import BYTE_EOS

# After `L` the model likes x best, then y, then z: two of three questions have the answer that it gives.
CHOICES = """
task: tiny_choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["x", "y", "z"]
doc_to_target: "{{label}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
WORDS = """
task: tiny_words
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{word}}"
generation_kwargs: {until: ["!"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""


def task(folder: Path, text: str, documents: list[dict[str, Any]]) -> None:
    name = text.split()[1]
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    (folder / f"{name}.yaml").write_text(text.replace("DATA", str(data)))


def test_c28_lm_eval(tmp_path: Path) -> None:
    parts = [rows(L=ROW_L), chain("P", "o", "k", "!", "?"), *(chain(letter, BYTE_EOS) for letter in "xyz")]
    model = table_checkpoint(tmp_path / "model", *parts)
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    task(tasks, CHOICES, [{"question": "aL", "label": label} for label in (0, 0, 1)])
    task(tasks, WORDS, [{"question": "P", "word": "ok"}, {"question": "aP", "word": "no"}])
    with ApiServer(model) as server:
        options = f"model={MODEL},base_url={server.url}/v1/completions,tokenizer={model},tokenizer_backend=huggingface"
        command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", options]
        command += ["--tasks", "tiny_choices,tiny_words", "--include_path", str(tasks), "--batch_size", "2"]
        command += ["--output_path", str(tmp_path / "out")]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(tmp_path / "hub"),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr[-3000:]
        server.assert_serves()
    [file] = (tmp_path / "out").rglob("results*.json")
    results = json.loads(file.read_text())["results"]
    assert abs(results["tiny_choices"]["acc,none"] - 2 / 3) < 1e-6
    assert results["tiny_words"]["exact_match,none"] == 0.5

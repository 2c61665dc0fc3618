"""What the package may import. (The order of its own layers is import-linter's business: ``.importlinter``.)"""

import ast
import sys
from collections.abc import Iterator

import pytest
from source_tree import SourceFile, source_files

# What a GPU image has. Everything but server/ must run with these, so a core module imports nothing else.
CORE_PACKAGES = {
    "accelerate",
    "gguf",
    "huggingface_hub",
    "matplotlib",
    "numpy",
    "psutil",
    "rich",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "typer",
}
# Packages that only one part of the house may know.
CONFINED = {
    "gguf": ("model/checkpoint/gguf_files.py",),
    "huggingface_hub": ("model/checkpoint/hub",),
    "triton": ("kernels/",),
    "typer": ("cli/",),
    "matplotlib": ("cli/", "timeline/", "bench/"),
}
CORE_FILES = [file for file in source_files() if not file.name.startswith("server/")]


def imported_packages(file: SourceFile) -> Iterator[str]:
    """Top-level names of every import, also of ``import_module("...")``."""
    for node in ast.walk(file.tree):
        match node:
            case ast.Import():
                yield from (alias.name.split(".")[0] for alias in node.names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.split(".")[0]
            case ast.ImportFrom():
                yield "a relative import"
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module")):
                yield str(ast.literal_eval(node.args[0])).split(".")[0]


@pytest.mark.parametrize("file", CORE_FILES, ids=lambda file: file.name)
def test_core_imports_only_what_a_gpu_image_has(file: SourceFile) -> None:
    foreign = set(imported_packages(file)) - set(sys.stdlib_module_names) - CORE_PACKAGES - {"gapless"}
    assert not foreign


@pytest.mark.parametrize("package", CONFINED)
def test_confined_packages_stay_where_they_belong(package: str) -> None:
    users = [file.name for file in source_files() if package in imported_packages(file)]
    assert not [name for name in users if not name.startswith(CONFINED[package])]


@pytest.mark.parametrize("file", source_files(), ids=lambda file: file.name)
def test_every_file_says_what_it_is(file: SourceFile) -> None:
    docstring = ast.get_docstring(file.tree)
    assert docstring, "no module docstring"
    assert len(docstring.splitlines()[0]) > 15

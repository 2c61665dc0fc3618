"""Code stays readable in one look, and nothing in it is unfinished."""

import ast
import re

import pytest
from source_tree import Function, SourceFile, functions_of, source_files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# A Triton kernel is one straight run over registers, and its signature alone takes a line an argument.
MAX_KERNEL_LINES = 110
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")


@pytest.mark.parametrize("file", source_files(), ids=lambda file: file.name)
def test_files_and_functions_are_short(file: SourceFile) -> None:
    assert len(file.text.splitlines()) <= MAX_FILE_LINES
    too_long = {}
    for name, node in functions_of(file.tree):
        lines = (node.end_lineno or 0) - node.lineno + 1
        if lines > (MAX_KERNEL_LINES if is_kernel(node) else MAX_FUNCTION_LINES):
            too_long[name] = lines
    assert not too_long


@pytest.mark.parametrize("file", source_files(), ids=lambda file: file.name)
def test_nothing_is_unfinished(file: SourceFile) -> None:
    assert not UNFINISHED.findall(file.text)
    raised = [ast.unparse(node) for node in ast.walk(file.tree) if isinstance(node, ast.Raise)]
    assert not [line for line in raised if "NotImplementedError" in line]


def is_kernel(node: Function) -> bool:
    """Whether Triton compiles the function."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)

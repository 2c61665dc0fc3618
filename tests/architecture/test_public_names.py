"""``__all__`` tells the truth: what a module shows is there, and what others take from it is shown."""

import ast

import pytest
from source_tree import SourceFile, bound_names, exported_names, source_files

import gapless

FILES = source_files()
MODULES = {file.module: file for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_names_in_all_exist(file: SourceFile) -> None:
    exported = exported_names(file.tree) or []
    assert len(exported) == len(set(exported)), "a name is listed twice"
    assert not [name for name in exported if name.startswith("_") and not name.startswith("__")]
    if file.module == "gapless":
        # The front door may load its names when they are first used.
        assert not [name for name in exported if not hasattr(gapless, name)]
    else:
        assert set(exported) <= bound_names(file.tree)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_modules_with_public_definitions_have_all(file: SourceFile) -> None:
    public = [
        node.name
        for node in file.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    assert not public or exported_names(file.tree) is not None, f"no __all__, but {public} look public"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_only_shown_names_are_taken_from_other_modules(file: SourceFile) -> None:
    hidden = []
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.ImportFrom) or node.module not in MODULES:
            continue
        shown = exported_names(MODULES[node.module].tree) or []
        for alias in node.names:
            if alias.name not in shown and f"{node.module}.{alias.name}" not in MODULES:
                hidden.append(f"{node.module}.{alias.name}")
    assert not hidden, f"imported, but not in the __all__ of where they live: {hidden}"

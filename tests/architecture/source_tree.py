"""The sources as the architecture tests see them: parsed, never imported."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "gapless"

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A Python file of the package; ``name`` is its path below ``src/gapless``, ``module`` what one imports."""

    name: str
    module: str
    text: str
    tree: ast.Module


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoped:
    """A node and the dotted name of the function or class around it, empty at module level."""

    scope: str
    node: ast.AST


@cache
def source_files() -> tuple[SourceFile, ...]:
    """Every Python file of the package, by name."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        parts = ["gapless", *inside.with_suffix("").parts]
        text = path.read_text(encoding="utf-8")
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(SourceFile(name=inside.as_posix(), module=module, text=text, tree=ast.parse(text)))
    assert len(found) > 20, "the package was not found"
    return tuple(found)


def walk_scoped(node: ast.AST, scope: str = "") -> Iterator[Scoped]:
    """Every node below ``node`` with its scope."""
    for child in ast.iter_child_nodes(node):
        yield Scoped(scope=scope, node=child)
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        inner = f"{scope}.{child.name}".lstrip(".") if named else scope
        yield from walk_scoped(child, inner)


def functions_of(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Every function with its dotted name."""
    for item in walk_scoped(tree):
        if isinstance(item.node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{item.scope}.{item.node.name}".lstrip("."), item.node


def bound_names(tree: ast.Module) -> set[str]:
    """Names that a module binds at its top level."""
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Import() | ast.ImportFrom():
                names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            case ast.Assign():
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


def exported_names(tree: ast.Module) -> list[str] | None:
    """What ``__all__`` says, or ``None`` where there is none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return None


def resolve(dotted: str) -> Function | ast.ClassDef | None:
    """The function or class called ``module.Class.method``, with the module's name below ``gapless``; or ``None``."""
    parts = dotted.split(".")
    modules = {file.module: file for file in source_files()}
    for split in range(len(parts) - 1, 0, -1):
        file = modules.get(".".join(["gapless", *parts[:split]]))
        if file is not None:
            return _find(file.tree, parts[split:])
    return None


def _find(node: ast.Module | ast.ClassDef, names: list[str]) -> Function | ast.ClassDef | None:
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and child.name == names[0]:
            if len(names) == 1:
                return child
            return _find(child, names[1:]) if isinstance(child, ast.ClassDef) else None
    return None

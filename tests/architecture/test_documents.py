"""The documents name only what is there: files, headings, folders and tests."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from source_tree import PACKAGE, ROOT, bound_names, resolve, source_files

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
TEST_NAME = re.compile(r"\btest_[a-z0-9_]+\b")
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.]+(/[\w.-]+)*/[\w-]+\.(?:py|json|md)|[\w.]+(/[\w.-]+)*/")
CLASS_NAME = re.compile(r"([A-Z][a-z]\w*[A-Z]\w*|[A-Z][a-z]+)(\.\w+)?")
DOTTED_NAME = re.compile(r"([a-z_]+\.)+[A-Za-z_]\w*(\.\w+)?")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@cache
def documents() -> tuple[Path, ...]:
    """README and its neighbours, and everything below ``docs/``."""
    found = (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")))
    assert len(found) > 8
    return found


@cache
def headings(path: Path) -> frozenset[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    lines = FENCE.sub("", path.read_text(encoding="utf-8")).splitlines()
    titles = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return frozenset(re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles)


@cache
def names_of_tests() -> frozenset[str]:
    """Every test function and test file there is."""
    names: set[str] = set()
    for path in ROOT.glob("tests/**/*.py"):
        names |= set(re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8")))
        names.add(path.stem)
    return frozenset(names)


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", documents(), ids=_relative)
def test_relative_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or not file.is_relative_to(ROOT) or (anchor and anchor not in headings(file)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", documents(), ids=_relative)
def test_tests_named_in_documents_exist(page: Path) -> None:
    named = set(TEST_NAME.findall(page.read_text(encoding="utf-8")))
    assert not named - names_of_tests()


def promises(page: str) -> dict[str, list[str]]:
    """What the table of the server's promises says, and the tests that each row names."""
    section = page.split("\n## The server\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in rows[0]] == ["promise", "test"]
    assert all(len(row) == 2 for row in rows), "a row is a promise and its tests"
    return {promise.strip(): re.findall(r"`(test_\w+)`", tests) for promise, tests in rows[2:]}


def test_every_promise_of_the_server_has_a_test() -> None:
    """One that is there and runs: a function of a test file, not skipped where it stands."""
    found = promises((ROOT / "docs/guarantees.md").read_text(encoding="utf-8"))
    assert len(found) > 30
    functions = {name for path in ROOT.glob("tests/**/test_*.py") for name in _running_tests(path)}
    assert [promise for promise, tests in found.items() if not tests] == []
    assert {promise: lost for promise, tests in found.items() if (lost := set(tests) - functions)} == {}


def test_a_promise_without_a_test_is_noticed() -> None:
    rows = "| promise | test |\n| --- | --- |\n| a | `test_b`, `test_c` |\n| d | soon |\n"
    page = f"# Page\n\n## The server\n\nText.\n\n{rows}\n## More\n"
    assert promises(page) == {"a": ["test_b", "test_c"], "d": []}


def _running_tests(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        node.name
        for node in functions
        if not any("skip" in ast.unparse(mark) or "xfail" in ast.unparse(mark) for mark in node.decorator_list)
    }


def test_tests_named_in_sources_exist() -> None:
    named = {(file.name, name) for file in source_files() for name in TEST_NAME.findall(file.text)}
    assert named, "hazards name the tests that guard them"
    # A comment may name a case by the start of its tests' names: test_c15.
    missing = {(file, name) for file, name in named if not any(test.startswith(name) for test in names_of_tests())}
    assert not missing


@pytest.mark.parametrize("page", documents(), ids=_relative)
def test_files_named_in_documents_exist(page: Path) -> None:
    named = {code for code in CODE.findall(page.read_text(encoding="utf-8")) if PATH.fullmatch(code)}
    places = (ROOT, PACKAGE, ROOT / "tests", ROOT / "docs")
    assert not [name for name in named if not any((place / name).exists() for place in places)]


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/token-walkthrough.md"])
def test_classes_and_functions_named_in_documents_exist(page: str) -> None:
    code = CODE.findall((ROOT / page).read_text(encoding="utf-8"))
    places: dict[str, list[str]] = {}
    for file in source_files():
        for name in bound_names(file.tree):
            places.setdefault(name, []).append(f"{file.module.removeprefix('gapless.')}.{name}")
    checked, wrong = set(), []
    for name in code:
        if match := CLASS_NAME.fullmatch(name):
            found = [resolve(place + (match[2] or "")) for place in places.get(match[1], [])]
        elif DOTTED_NAME.fullmatch(name) and (PACKAGE / name.split(".")[0]).is_dir():
            found = [resolve(name)]
        else:
            continue
        checked.add(name)
        if not any(found):
            wrong.append(name)
    assert len(checked) > 15
    assert not wrong


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_every_part_of_the_package_is_described(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    parts = [path for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))]
    modules = [path for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]
    assert not [part.name for part in parts if f"{part.name}/" not in text]
    assert not [module.name for module in modules if module.name not in text]


def test_every_decision_is_listed() -> None:
    listed = (ROOT / "docs/decisions/README.md").read_text(encoding="utf-8")
    pages = sorted(path.name for path in (ROOT / "docs/decisions").glob("0*.md"))
    assert [page for page in pages if f"({page})" not in listed] == []
    assert [page[:4] for page in pages] == [f"{number:04d}" for number in range(1, len(pages) + 1)]


def test_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    used = {name for page in documents() for name in re.findall(r"(?:^|\$ |`)make ([a-z-]+)", page.read_text("utf-8"))}
    assert {"demo", "test"} <= used
    assert used <= targets

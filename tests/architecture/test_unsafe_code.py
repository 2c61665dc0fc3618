"""Nothing in the package turns bytes into code: no pickle, no code built from text, no code out of a model's folder."""

import ast
from collections.abc import Iterator

import pytest
from source_tree import SourceFile, source_files

# Modules whose purpose is to make objects of the sender's choice, or to run what a text says.
MODULES = {
    *("pickle", "_pickle", "cPickle", "pickletools", "marshal", "shelve", "copyreg", "dill", "cloudpickle", "joblib"),
    *("multiprocessing", "yaml", "jsonpickle", "code", "codeop", "runpy", "zipimport", "xmlrpc"),
}
# Functions that do, whatever object they belong to.
FUNCTIONS = {
    *("recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized", "read_pickle", "unsafe_load", "full_load"),
    *("exec_module", "load_module", "spec_from_file_location", "import_string", "get_class_from_dynamic_module"),
}
SHELLS = {"system", "popen", "getoutput", "getstatusoutput"}  # of os and subprocess
BUILTINS = {"eval", "exec", "compile", "__import__"}
LOADERS = {"torch", "np", "numpy", "joblib", "hub"}  # torch.load, numpy.load: both read pickles
# Arguments and the only value that they may have.
ARGUMENTS = {
    "trust_remote_code": False,
    "weights_only": True,
    "allow_pickle": False,
    "shell": False,
    "use_safetensors": True,
}


def unsafe(file: SourceFile) -> Iterator[str]:
    """What a file has of them."""
    for node in ast.walk(file.tree):
        match node:
            case ast.Import(names=names):
                yield from sorted({alias.name.split(".")[0] for alias in names} & MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                yield from sorted({module.split(".")[0]} & MODULES)
                yield from sorted({alias.name for alias in names} & (FUNCTIONS | BUILTINS | SHELLS))
                if module.split(".")[0] in LOADERS:
                    yield from (f"{module}.load" for alias in names if alias.name == "load")
            case ast.Attribute(value=ast.Name(id=owner), attr="load") if owner in LOADERS:
                yield f"{owner}.load"
            case ast.Attribute(value=ast.Name(id="builtins" | "__builtins__"), attr=name) if name in BUILTINS:
                yield f"builtins.{name}"
            case ast.Attribute(value=ast.Name(id="os" | "subprocess" as owner), attr=name) if name in SHELLS:
                yield f"{owner}.{name}"
            case ast.Attribute(attr=name) if name in FUNCTIONS | {"eval", "exec"}:
                yield name
            case ast.Name(id=name) if name in BUILTINS | FUNCTIONS:
                yield name
            case ast.keyword(arg=str(name), value=value) if name in ARGUMENTS:
                if not (isinstance(value, ast.Constant) and value.value is ARGUMENTS[name]):
                    yield f"{name}={ast.unparse(value)}"


@pytest.mark.parametrize("file", source_files(), ids=lambda file: file.name)
def test_nothing_that_is_read_can_become_code(file: SourceFile) -> None:
    assert not list(unsafe(file))


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import os, marshal",
        "from multiprocessing.reduction import ForkingPickler",
        "from torch import load",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "numpy.lib.format.read_array(file, allow_pickle=True)",
        "yaml.unsafe_load(text)",
        "import yaml",
        "eval(text)",
        "builtins.exec(text)",
        "namespace.eval(text)",
        "compile(text, '', 'exec')",
        "__import__(name)",
        "socket.recv_pyobj()",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "AutoTokenizer.from_pretrained(folder, trust_remote_code=True)",
        "AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)",
        "importlib.util.spec_from_file_location(name, path)",
    ],
)
def test_each_way_to_run_code_is_noticed(text: str) -> None:
    assert list(unsafe(SourceFile(name="made_up.py", module="gapless.made_up", text=text, tree=ast.parse(text))))


def test_every_transformers_loader_is_told_to_run_no_code() -> None:
    """Without the argument, ``from_pretrained`` may ask whoever sits at the terminal."""
    found = []
    for file in source_files():
        for node in ast.walk(file.tree):
            match node:
                case ast.Call(func=ast.Attribute(attr="from_pretrained"), keywords=keywords):
                    found.append(file.name)
                    assert "trust_remote_code" in {keyword.arg for keyword in keywords}, file.name
    assert found

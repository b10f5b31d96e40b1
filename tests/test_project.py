"""The static gate: what no tracked Python file may contain, read from its syntax tree.

Each rule is a function from a parsed file to the lines that break it, so that it can be
tried on a snippet that does break it: a rule that finds nothing anywhere proves nothing.
"""

import ast
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
Rule = Callable[[ast.Module], Iterator[int]]

UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load"}
WEB_ONLY = {"service", "fastapi", "starlette", "uvicorn", "prometheus_client", "httpx"}
DATA_SUFFIXES = {".jsonl", ".json", ".png", ".safetensors", ".txt.gz"}


def tracked(*patterns: str) -> list[Path]:
    """Files of the working tree that git tracks, or would track if they were added."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = (ROOT / name for name in listing.split("\0") if name)
    return sorted(path for path in paths if path.is_file())


def dotted(node: ast.expr) -> str:
    """`torch.load` of the expression torch.load; '' of anything that is not a plain chain."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every absolute import, wherever in the file it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def aliases(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for, so that `import numpy as np` hides nothing."""
    table: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            table |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            table |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return table


def resolved(node: ast.expr, table: dict[str, str]) -> str:
    """The dotted name with its first part replaced by what that name was imported as."""
    head, _, tail = dotted(node).partition(".")
    return ".".join(part for part in (table.get(head, head), tail) if part)


def unsafe_modules(tree: ast.Module) -> Iterator[int]:
    """Modules that run what they read."""
    return (line for line, name in imported(tree) if name.split(".")[0] in UNSAFE_MODULES)


def unsafe_calls(tree: ast.Module) -> Iterator[int]:
    """Calls that run what they read (a method of one's own named `eval` is no such call)."""
    table = aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and resolved(node.func, table) in UNSAFE_CALLS:
            yield node.lineno


def broad_excepts(tree: ast.Module) -> Iterator[int]:
    """`except:`, `except Exception` and `except BaseException`, alone or in a tuple.

    One that ends by raising again is a clean-up, and one that returns what it caught hands it on:
    neither swallows anything.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and not _hands_on(node):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(c is None or dotted(c) in {"Exception", "BaseException"} for c in caught):
                yield node.lineno


def _hands_on(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    if isinstance(last, ast.Return) and handler.name is not None:
        return any(isinstance(n, ast.Name) and n.id == handler.name for n in ast.walk(last))
    return isinstance(last, ast.Raise) and last.exc is None


def asserts(tree: ast.Module) -> Iterator[int]:
    """`python -O` removes them, so none may guard anything outside the tests."""
    return (node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert))


def prints(tree: ast.Module) -> Iterator[int]:
    """Output goes through the log or a rich console."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) == "print":
            yield node.lineno


def served_files_and_forms(tree: ast.Module) -> Iterator[int]:
    """FileResponse hands out paths; request.form() spools uploads of any size to disk."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in {"form", "FileResponse"}:
            yield node.lineno
        elif isinstance(node, ast.alias) and node.name == "FileResponse":
            yield node.lineno


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that Python evaluates while importing: function bodies wait, defaults do not."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            if not isinstance(child, ast.Lambda):
                for decorator in child.decorator_list:
                    yield from [decorator, *run_at_import(decorator)]
            yield from run_at_import(child.args)
        else:
            yield child
            yield from run_at_import(child)


def environment_at_import(tree: ast.Module) -> Iterator[int]:
    """A module that reads the environment while it is imported cannot be configured by a test."""
    table = aliases(tree)
    for node in run_at_import(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            if resolved(node, table) in {"os.environ", "os.getenv", "os.environb"}:
                yield node.lineno


def web_imports(tree: ast.Module) -> Iterator[int]:
    """mappers/ knows nothing of HTTP: imports point from service to mappers only."""
    return (line for line, name in imported(tree) if name.split(".")[0] in WEB_ONLY)


PACKAGES = ("service/*.py", "mappers/*.py")

# Every rule with the files that it holds for.
RULES: list[tuple[Rule, tuple[str, ...]]] = [
    (unsafe_modules, ("*.py",)),
    (unsafe_calls, ("*.py",)),
    (broad_excepts, ("*.py",)),
    (environment_at_import, ("*.py",)),
    (asserts, PACKAGES),
    (prints, PACKAGES),
    (served_files_and_forms, ("service/*.py",)),
    (web_imports, ("mappers/*.py",)),
]

# Snippets that break a rule, each on its second line.
BROKEN: list[tuple[Rule, str]] = [
    (unsafe_modules, "def f():\n    import pickle"),
    (unsafe_modules, "\nfrom cloudpickle import loads"),
    (unsafe_calls, "import torch as t\nt.load('x')"),
    (unsafe_calls, "from yaml import load\nload('x')"),
    (unsafe_calls, "\nf(eval('1'))"),
    (broad_excepts, "try: f()\nexcept Exception as e: pass"),
    (broad_excepts, "try: f()\nexcept (OSError, BaseException): pass"),
    (broad_excepts, "try: f()\nexcept: pass"),
    (environment_at_import, "import os\nX = os.environ['X']"),
    (environment_at_import, "from os import getenv\ndef f(x=getenv('X')): ..."),
    (environment_at_import, "import os\nclass C: x = os.getenv('X')"),
    (environment_at_import, "import os\n@g(os.environ)\ndef f(): ..."),
    (asserts, "def f(x):\n    assert x"),
    (prints, "\nprint('x')"),
    (served_files_and_forms, "async def f(request):\n    await request.form()"),
    (served_files_and_forms, "\nfrom fastapi.responses import FileResponse"),
    (web_imports, "def f():\n    from service.app import create_app"),
    (web_imports, "\nimport prometheus_client"),
]


@pytest.mark.parametrize(("rule", "patterns"), RULES)
def test_no_file_breaks_the_rule(rule: Rule, patterns: tuple[str, ...]) -> None:
    files = tracked(*patterns)
    assert files
    broken = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line in rule(ast.parse(path.read_text()))
    ]
    assert broken == []


@pytest.mark.parametrize(("rule", "snippet"), BROKEN)
def test_the_rule_sees_what_breaks_it(rule: Rule, snippet: str) -> None:
    assert set(rule(ast.parse(snippet))) == {2}


def test_every_rule_has_a_snippet() -> None:
    assert {rule for rule, _ in RULES} == {rule for rule, _ in BROKEN}


def test_a_handler_that_raises_again_is_allowed() -> None:
    tree = ast.parse("try: f()\nexcept BaseException:\n    g()\n    raise")
    assert list(broad_excepts(tree)) == []


def test_a_handler_that_returns_what_it_caught_is_allowed_and_another_value_is_not() -> None:
    source = "def g():\n    try: f()\n    except BaseException as end:\n        return {}, 1"
    assert list(broad_excepts(ast.parse(source.format("end")))) == []
    assert list(broad_excepts(ast.parse(source.format("None")))) == [3]


def test_an_environment_read_inside_a_function_is_allowed() -> None:
    tree = ast.parse("import os\ndef f():\n    return os.environ['X'], lambda: os.getenv('Y')")
    assert list(environment_at_import(tree)) == []


def test_text_is_ascii() -> None:
    texts = [path for path in tracked() if path.suffix not in DATA_SUFFIXES]
    assert ROOT / "pyproject.toml" in texts
    broken = [str(path.relative_to(ROOT)) for path in texts if not path.read_bytes().isascii()]
    assert broken == []


def test_no_module_is_named_after_nothing() -> None:
    """utils.py, helpers.py and common.py hide ideas that have names."""
    assert [p.name for p in tracked("*.py") if p.stem in {"utils", "helpers", "common"}] == []

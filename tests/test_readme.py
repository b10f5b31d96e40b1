"""README.md is checked like code: its commands parse, its files exist, its tables are complete."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from service.cli import app
from service.errors import CODES
from service.schemas import REASONS, TranslateRequest
from service.settings import Settings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FIRST_SCREEN_LINES = 25
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
INLINE = re.findall(r"`([^`\n]+)`", PROSE)
# Folders that the examples speak of, and that are the reader's own.
READERS_OWN = ("path/to/", "texts/", "held-out/", "mappers-fitted/", "folder/")


def section(title: str) -> str:
    """The text under a heading, up to the next of its level."""
    found = re.search(
        rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL
    )
    assert found is not None, f"no section {title!r}"
    return found[1]


def table(text: str, first_header: str) -> list[list[str]]:
    """The rows of the Markdown table whose first column has this header."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_header} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def code_words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def shell_lines() -> list[str]:
    """Command lines of the blocks, continued lines joined and comments cut off."""
    text = "\n".join(body for language, body in BLOCKS if language in {"", "sh"})
    return [line.partition(" #")[0].strip() for line in text.replace("\\\n", " ").splitlines()]


def kvt_commands() -> list[str]:
    inline = [re.sub(r"<[^>]*>", "X", word) for word in INLINE]
    lines = [re.sub(r"<[^>]*>", "X", line) for line in shell_lines()]
    return sorted({c for c in (*inline, *lines) if re.match(r"kvt [a-z]", c)})


def test_the_first_screen_has_the_two_commands() -> None:
    first_screen = README.splitlines()[:FIRST_SCREEN_LINES]
    assert any(line.startswith("make demo") for line in first_screen)
    assert any(line.startswith("make test") for line in first_screen)


@pytest.mark.parametrize("line", kvt_commands())
def test_kvt_commands_parse(line: str) -> None:
    _, *arguments = shlex.split(line)
    command = typer.main.get_command(app)
    while isinstance(command, TyperGroup) and arguments:
        command = command.commands[arguments.pop(0)]
    context = typer.Context(command)
    given, rest, _ = command.make_parser(context).parse_args([*arguments])
    assert rest == []
    if len(arguments) > 0:
        missing = [p.name for p in command.params if p.required and not given.get(p.name)]
        assert missing == []


def test_there_are_commands_to_check() -> None:
    names = {line.split()[1] for line in kvt_commands()}
    assert names >= {"serve", "fit", "evaluate", "inspect", "verify", "export", "import", "demo"}


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {line.split()[1] for line in (*shell_lines(), *INLINE) if re.match(r"make [a-z]", line)}
    assert named >= {"demo", "test", "serve", "bench"}
    assert named <= targets


def test_every_file_named_exists() -> None:
    top = {path.name for path in ROOT.iterdir()}
    paths = [
        word
        for word in INLINE
        if re.fullmatch(r"[\w./-]+", word)
        and word.split("/")[0] in top
        and not word.startswith(READERS_OWN)
    ]
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_listed_files_exist() -> None:
    listed = re.findall(r"^([\w./-]+)  +\S", section("The files"), re.MULTILINE)
    assert len(listed) > 20
    assert [name for name in listed if not (ROOT / name).exists()] == []


def test_every_module_says_what_it_holds() -> None:
    modules = [
        path
        for package in ("mappers", "service")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    ]
    docs = {path.name: ast.get_docstring(ast.parse(path.read_text())) for path in modules}
    assert [name for name, doc in docs.items() if not (doc or "").strip()] == []


@pytest.mark.parametrize("body", [body for language, body in BLOCKS if language == "python"])
def test_python_blocks_compile_and_import_what_exists(body: str) -> None:
    tree = ast.parse(body)
    compile(tree, "README.md", "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            assert [a.name for a in node.names if not hasattr(module, a.name)] == []


def test_links_within_the_page_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.+)$", PROSE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
    links = set(re.findall(r"\]\(#([^)]+)\)", README))
    assert links
    assert links <= anchors


def test_the_settings_table_has_the_defaults() -> None:
    for name, default, _ in table(section("Serve"), "setting"):
        assert str(Settings.model_fields[name.strip("`")].default) == default


def test_the_request_table_has_every_field() -> None:
    rows = table(section("The wire"), "field")
    named = {word for row in rows for word in code_words(row[0])}
    reserved = {"heads"}
    assert named == set(TranslateRequest.model_fields) - reserved


def test_the_reason_table_is_the_closed_list() -> None:
    rows = table(section("Answers, errors, reasons"), "reason")
    assert [word for row in rows for word in code_words(row[0])] == list(REASONS)


def test_the_code_table_has_every_code_with_its_status() -> None:
    rows = table(section("Answers, errors, reasons"), "code")
    listed = {word: int(row[1]) for row in rows for word in code_words(row[0])}
    assert listed == {code: kind.status for code, kind in CODES.items()}

"""The house's size limits: small files, small functions, few arguments. Prints the medians."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE_LIMIT, KERNEL_FILE_LIMIT, FAMILY_FILE_LIMIT = 400, 500, 200
FUNCTION_LIMIT, ARGUMENT_LIMIT = 60, 6
EXEMPT_ARGUMENTS = ("freetoken/cli/", "freetoken/daemon/handlers/")  # typer verbs, route handlers
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> list[Path]:
    return sorted([*(ROOT / "freetoken").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])


def functions(path: Path) -> Iterator[Function]:
    return (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def lines_of(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def arguments_of(node: Function) -> int:
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def file_limit(path: Path) -> int:
    if "kernels" in path.parts:
        return KERNEL_FILE_LIMIT
    return FAMILY_FILE_LIMIT if path.parent.name == "families" else FILE_LIMIT


def test_files_are_small() -> None:
    sizes = {path: len(path.read_text().splitlines()) for path in sources()}
    print(f"\nfiles: {len(sizes)}, median {statistics.median(s for s in sizes.values() if s):.0f} lines")
    assert {name_of(p): s for p, s in sizes.items() if s > file_limit(p)} == {}


def test_functions_are_small() -> None:
    found = [(name_of(p), f) for p in sources() if "kernels" not in p.parts for f in functions(p)]
    print(f"\nfunctions: {len(found)}, median {statistics.median(lines_of(f) for _, f in found):.0f} lines")
    assert [(n, f.name, lines_of(f)) for n, f in found if lines_of(f) > FUNCTION_LIMIT] == []


def test_functions_take_few_arguments() -> None:
    found = [(name_of(p), f) for p in sources() if "kernels" not in p.parts for f in functions(p)]
    checked = [(n, f) for n, f in found if not n.startswith(EXEMPT_ARGUMENTS) and f.name != "__init__"]
    assert [(n, f.name, arguments_of(f)) for n, f in checked if arguments_of(f) > ARGUMENT_LIMIT] == []


def test_modules_say_what_they_are() -> None:
    """Every module opens with a docstring; package files are empty but for the version."""
    silent = [
        name_of(p) for p in sources() if p.name != "__init__.py" and not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert silent == []
    packages = [name_of(p) for p in sources() if p.name == "__init__.py" and p.read_text().strip()]
    assert packages == ["freetoken/__init__.py"]

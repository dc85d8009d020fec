"""The API's import weight: the idle daemon carries it."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_routes_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'tokenizers', 'transformers', 'openai', 'httpx', 'jinja2', 'rich', 'typer'}"
    code = f"import sys, freetoken.api.routes; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.strip() == "[]"

"""Imports point one way; what runs on a laptop imports neither torch nor vLLM; one module knows vLLM's internals."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parent.parent
ROOTS = {
    "tandem": HOME / "tandem",
    "tandem_evals": HOME / "evals/tandem_evals",
    "tandem_tuner": HOME / "tuner/tandem_tuner",
}
MAY_IMPORT = {
    "tandem": {"tandem"},
    "tandem_evals": {"tandem", "tandem_evals"},
    "tandem_tuner": {"tandem", "tandem_evals", "tandem_tuner"},
}
VLLM_IMPORTER = "tandem.compat"
# The engine: these may import torch when they are imported. Everything else may not, not even through another module.
ENGINE = (
    "tandem.backend", "tandem.bench", "tandem.codec", "tandem.cpu_pool", "tandem.kernels", "tandem.moe",
    "tandem.package.", "tandem.placement", "tandem.plugin", "tandem.quant", "tandem.routes", "tandem.selfcheck",
    "tandem.stats", "tandem.store", "tandem.trace",
)  # fmt: skip
LIGHT_ANYWAY = ("tandem.package.manifest",)


def modules() -> dict[str, Path]:
    found = {}
    for name, folder in ROOTS.items():
        for path in sorted(folder.rglob("*.py")):
            inner = path.relative_to(folder).with_suffix("").parts
            parts = (name, *inner)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that the file imports, anywhere in it, with its line."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module or "", node.lineno


def is_light(module: str) -> bool:
    return module in LIGHT_ANYWAY or not module.startswith(ENGINE)


def test_imports_point_one_way() -> None:
    wrong = []
    for module, path in modules().items():
        allowed = MAY_IMPORT[module.partition(".")[0]]
        for name, line in imported(path):
            top = name.partition(".")[0]
            if top in ROOTS and top not in allowed:
                wrong.append(f"{path.relative_to(HOME)}:{line} imports {name}")
    assert wrong == []


def test_only_compat_imports_vllm() -> None:
    wrong = []
    for module, path in modules().items():
        if module != VLLM_IMPORTER:
            names = ((name, line) for name, line in imported(path) if name.partition(".")[0] == "vllm")
            wrong += [f"{path.relative_to(HOME)}:{line} imports {name}" for name, line in names]
    assert wrong == []


LOOK = """
import importlib, importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "vllm", "triton", "transformers"):
            raise ImportError(f"{name} is blocked: this module must not import it")

sys.meta_path.insert(0, Block())
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as problem:
        failed.append(f"{name}: {problem}")
print("\\n".join(failed))
"""


def test_light_modules_import_without_torch_and_vllm() -> None:
    light = [module for module in modules() if is_light(module)]
    assert {"tandem.cli", "tandem.machine", "tandem_evals.cli", "tandem_tuner.cli"} <= set(light)
    answer = subprocess.run([sys.executable, "-c", LOOK, *light], capture_output=True, text=True, check=False, cwd=HOME)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == ""


@pytest.mark.parametrize("prefix", ENGINE)
def test_every_engine_entry_exists(prefix: str) -> None:
    assert any(module.startswith(prefix) for module in modules())

"""The optional parts import nothing while they are unused, and say what to install where it is missing.

Run: python -m pytest -q tests/test_integrations.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_cosyh3.errors import CosyH3Error

ROOT = Path(__file__).parent.parent
OTHERS = ("torch", "langchain_core", "pydantic", "comfy", "folder_paths")
HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
"""


def run(code, hidden=OTHERS):
    """stdout of a Python in which the modules `hidden` cannot be imported."""
    done = subprocess.run(
        [sys.executable, "-c", HIDE.format(hidden=hidden) + code], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MLX_DISABLE_COMPILE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_is_imported():
    """Both families run without any of the other libraries, and try none of them."""
    out = run("""
import builtins
import mlx_cosyh3, mlx_cosyh3.integrations
print(len(mlx_cosyh3.generate(mlx_cosyh3.load(), "It was", max_tokens=3, seed=1).tokens))
print(len(mlx_cosyh3.generate(mlx_cosyh3.load("cosyvoice3-tiny"), "Yes.", seed=1, max_seconds=0.2).audio) > 0)
print([m for m in sys.modules if m.startswith("mlx_cosyh3.integrations.")])
""")
    assert out.split("\n") == ["3", "True", "[]"]


def test_a_node_pack_of_nothing():
    """ComfyUI imports every pack at its start: this one takes nothing along, and its menus work without MLX."""
    out = run("""
import importlib.util
spec = importlib.util.spec_from_file_location("pack", "comfyui/__init__.py")
pack = sys.modules["pack"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack)
print(len([node.INPUT_TYPES() for node in pack.NODE_CLASS_MAPPINGS.values()]))
print([m for m in ("mlx", "mlx_cosyh3", "numpy", "torch") if m in sys.modules])
try:
    pack.NODE_CLASS_MAPPINGS["CosyH3LoadModel"]().load_model("h3-tiny")
except RuntimeError as e:
    print(e)
""", hidden=("mlx_cosyh3", *OTHERS)).split("\n")  # fmt: skip
    assert out[:2] == ["4", "[]"]
    assert out[2].startswith("mlx_cosyh3 is not installed in ComfyUI's Python") and len(out) == 3


def line(package, extra):
    return f"{package} is not installed: pip install {package} (the extra {extra!r} of mlx-cosyh3)"


@pytest.mark.parametrize("module, package", [("torch", "torch"), ("langchain", "langchain-core")])
def test_what_to_install(module, package):
    out = run(f"""
from mlx_cosyh3.errors import CosyH3Error
for error in (CosyH3Error, ImportError):
    try:
        import mlx_cosyh3.integrations.{module}
    except error as e:
        print(e)
""")
    assert out.split("\n") == [line(package, module)] * 2


def test_output_without_torch():
    """Told before any work."""
    out = run("""
import mlx_cosyh3
class Model:
    def generate(self, *args, **options):
        print("worked")
    stream_generate = batch_generate = generate
for function in (mlx_cosyh3.generate, mlx_cosyh3.stream_generate, mlx_cosyh3.batch_generate):
    try:
        function(Model(), "It was", output="torch")
    except ValueError as e:
        print(type(e).__name__, e)
""")
    assert out.split("\n") == ["MissingExtra " + line("torch", "torch")] * 3


def test_missing_extra_is_an_error_for_users():
    from mlx_cosyh3.integrations import MissingExtra

    assert issubclass(MissingExtra, CosyH3Error) and issubclass(MissingExtra, ImportError)

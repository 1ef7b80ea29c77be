"""tests/harness/cuda_stand_ins.py SITE: CUDA's libraries in a copy of site-packages, made small.

PyPI's PyTorch for Linux is linked against two gigabytes of CUDA libraries, and is loaded only
where they are, though none of them is called on a machine without a GPU. What PyTorch does not
link against is removed; of the rest, what is large is replaced by a library that has the same
symbols, each a function that returns 0. SITE may be made of hard links: no file is written into.
Needs gcc and binutils; without gcc what is linked against stays as it is.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_LARGE = 10_000_000
_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def main(site: Path) -> None:
    """Shrink SITE/nvidia to what `import torch` needs on a CPU."""
    libraries = {path.name: path for path in site.glob("nvidia/**/*.so*")}
    wanted = _linked(list(site.glob("torch/**/*.so")), libraries)
    for path in site.glob("nvidia/**/*"):
        if path.is_file() and path.name not in wanted and path.suffix != ".py":
            path.unlink()
    if shutil.which("gcc"):
        for name in wanted:
            if libraries[name].stat().st_size > _LARGE:
                _replace(libraries[name])


def _linked(roots: list[Path], libraries: dict[str, Path]) -> set[str]:
    """The names of those libraries that the roots link against, and these in their turn."""
    found: set[str] = set()
    left = list(roots)
    while left:
        new = [name for name in _needed(left.pop()) if name in libraries and name not in found]
        found.update(new)
        left += [libraries[name] for name in new]
    return found


def _needed(path: Path) -> list[str]:
    told = subprocess.run(["objdump", "-p", path], capture_output=True, text=True, check=True)
    return re.findall(r"^\s+NEEDED\s+(\S+)$", told.stdout, re.MULTILINE)


def _replace(library: Path) -> None:
    told = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    versions: dict[str, list[str]] = {}
    for line in told.stdout.splitlines():
        kind, symbol = line.split()[-2:]
        name, _, version = symbol.partition("@")
        # Templates of C++'s library are everybody's: a stand-in must not offer them to others.
        shared = kind in "Wu" and name.startswith("_Z")
        if kind != "A" and not shared and _SYMBOL.fullmatch(name):
            versions.setdefault(version.lstrip("@"), []).append(name)
    labels = [name for names in versions.values() for name in names]
    text = "".join(f".globl {name}\n.type {name}, @function\n{name}:\n" for name in labels)
    code = f'.text\n{text}\txorl %eax, %eax\n\tret\n.section .note.GNU-stack,"",@progbits\n'
    script = "".join(
        f"{version} {{ global: {'; '.join(names)}; }};\n"
        for version, names in versions.items()
        if version
    )
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "all.s", Path(folder) / library.name
        source.write_text(code)
        (Path(folder) / "versions.map").write_text(script)
        options = ["-shared", "-nostdlib", f"-Wl,-soname,{library.name}"]
        if script:
            options += [f"-Wl,--version-script={folder}/versions.map"]
        subprocess.run(["gcc", *options, "-o", made, source], check=True)
        # A new file: the old one may be somebody else's too.
        library.unlink()
        shutil.copy(made, library)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Draws where parts are imported, by the core and by each other, for docs/adapting.md.

python -m tests.tools.drawing
"""

import ast
from pathlib import Path

from parts import PARTS

ROOT = Path(__file__).resolve().parents[2]
PART_OF = {Path(file).stem: part.name for part in PARTS for file in part.files}


def imported_by(tree: ast.Module) -> dict[str, bool]:
    """Returns the modules that one imports, and whether it does so at its top."""
    imported = {}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "optional":
            names = [node.args[0].value]
        for name in names:
            imported[name] = imported.get(name, False) or node in tree.body
    return imported


def drawing() -> str:
    """Returns a drawing in Mermaid: a dotted arrow is an import within a function."""
    arrows = set()
    core = set()
    for path in ROOT.glob("*.py"):
        part = PART_OF.get(path.stem)
        for name, is_at_top in imported_by(ast.parse(path.read_text())).items():
            other = PART_OF.get(name, part)
            if other == part:
                continue
            arrows.add(f"  {part or path.stem} {'-->' if is_at_top else '-.->'} {other}")
            if part is None:
                core.add(f"    {path.stem}")
    parts = [f"    {part.name}" for part in PARTS]
    lines = ["flowchart LR", "  subgraph parts", *parts, "  end"]
    lines += ["  subgraph core", *sorted(core), "    others", "  end", "  parts --> core"]
    return "\n".join([*lines, *sorted(arrows), ""])


if __name__ == "__main__":
    print(drawing(), end="")

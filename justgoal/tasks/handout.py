"""What the agent finds in /task: the task, and nothing that only the judge may know.

reference.py goes in without its edge cases: only `reference`, `make_inputs` and what these two use are copied, so
nothing that serves an edge case alone is left behind either.
"""

import ast
import json
import shutil
from pathlib import Path

from justgoal.tasks.contract import Task

PUBLIC = ("reference", "make_inputs", "comparable")


def write(task: Task, goal: str, expert: str, prompts: Path, folder: Path) -> None:
    """Fill the new folder `folder`; `expert` is the name of the expert that counts."""
    operator = task.operator
    folder.mkdir(parents=True)
    (folder / "goal.txt").write_text(goal + "\n", encoding="utf-8")
    shutil.copy(operator.folder / "operator.toml", folder)
    (folder / "reference.py").write_text(public_source(operator.folder / "reference.py"), encoding="utf-8")
    workload = {
        "name": task.workload.name,
        "axes": dict(task.workload.axes),
        "values": dict(task.workload.values),
        "dtypes": dict(task.workload.dtypes),
    }
    (folder / "workload.json").write_text(json.dumps(workload, indent=1) + "\n", encoding="utf-8")
    shutil.copy(prompts / "task.md", folder / "README.md")
    shutil.copy(prompts / "inputs.py", folder)
    [source] = [one.folder for one in operator.experts if one.name == expert]
    shutil.copytree(source, folder / "expert", ignore=shutil.ignore_patterns("__pycache__"))


def public_source(path: Path) -> str:
    """The source of reference.py, reduced to its docstring, its imports, and what PUBLIC reaches."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    named: dict[str, ast.stmt] = {name: node for node in tree.body for name in _defines(node)}
    wanted, found = [name for name in PUBLIC if name in named], set[str]()
    while wanted:
        name = wanted.pop()
        if name not in found:
            found.add(name)
            wanted += [used for used in _uses(named[name]) if used in named]
    kept = [
        node
        for index, node in enumerate(tree.body)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        or (index == 0 and ast.get_docstring(tree) is not None)
        or any(name in found for name in _defines(node))
    ]
    return "\n\n".join(_segment(source, node) for node in kept) + "\n"


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return []


def _uses(node: ast.stmt) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _segment(source: str, node: ast.stmt) -> str:
    """The source of a statement with its decorators; the lines between statements are left out."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])

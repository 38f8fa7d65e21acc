"""What the agent finds in /task: the task, and nothing that only the judge may know.

reference.py goes in without its edge cases: only `reference`, `make_inputs` and what these two use are copied, so
nothing that serves an edge case alone is left behind either.
"""

import ast
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from justgoal.tasks.contract import Task

PUBLIC = ("reference", "make_inputs", "comparable")


def write(task: Task, goal: str, expert: str, terms: Mapping[str, str], prompts: Path, folder: Path) -> None:
    """Fill the new folder `folder`; `expert` names the one that counts, `terms` stand in braces in task.md."""
    operator = task.operator
    folder.mkdir(parents=True)
    (folder / "goal.txt").write_text(goal + "\n", encoding="utf-8")
    (folder / "operator.toml").write_text(public_toml(operator.folder / "operator.toml"), encoding="utf-8")
    (folder / "reference.py").write_text(public_source(operator.folder / "reference.py"), encoding="utf-8")
    workload = {
        "name": task.workload.name,
        "axes": dict(task.workload.axes),
        "values": dict(task.workload.values),
        "dtypes": dict(task.workload.dtypes),
    }
    (folder / "workload.json").write_text(json.dumps(workload, indent=1) + "\n", encoding="utf-8")
    judged = (prompts / "task.md").read_text(encoding="utf-8")
    (folder / "README.md").write_text(judged.format(**terms), encoding="utf-8")
    shutil.copy(prompts / "inputs.py", folder)
    [source] = [one.folder for one in operator.experts if one.name == expert]
    shutil.copytree(source, folder / "expert", ignore=shutil.ignore_patterns("__pycache__"))


def public_toml(path: Path) -> str:
    """operator.toml without the experts and without what it says of tolerances and bugs."""
    text = path.read_text(encoding="utf-8")
    blocks = re.split(r"(?m)^(?=\[)", text)
    secret = re.compile(r"\[\[?\s*(experts|tolerances|harmless)\b")
    return "".join(block for block in blocks if not secret.match(block)).rstrip() + "\n"


def public_source(path: Path) -> str:
    """The source of reference.py, reduced to its docstring, its imports, and what PUBLIC reaches."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    defining: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        for name in _defines(node):
            defining.setdefault(name, []).append(node)
    wanted, found = [name for name in PUBLIC if name in defining], set[str]()
    kept: list[ast.stmt] = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    if ast.get_docstring(tree) is not None:
        kept.append(tree.body[0])
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        found.add(name)
        for node in defining[name]:
            kept.append(node)
            wanted += [used for used in _uses(node) if used in defining]
    return "\n\n".join(_segment(source, node) for node in tree.body if node in kept) + "\n"


def _defines(node: ast.stmt) -> set[str]:
    """The names of the module that a statement gives a meaning to, whatever kind of statement it is."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    names = set[str]()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names.add(inner.id)
        elif isinstance(inner, (ast.Subscript, ast.Attribute)) and isinstance(inner.ctx, ast.Store):
            names |= _uses(inner.value)  # TABLE["x"] = ..., which belongs to TABLE
        elif isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
            names.add(inner.name)
        elif isinstance(inner, ast.alias):
            names.add((inner.asname or inner.name).split(".")[0])
    return names


def _uses(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _segment(source: str, node: ast.stmt) -> str:
    """The source of a statement with its decorators; the lines between statements are left out."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])

"""`justgoal tasks new NAME`: a folder for an operator of one's own, which already passes as a toy."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from justgoal.errors import UsageError
from justgoal.tasks import contract
from justgoal.tasks.schema import NAME

TEMPLATE = Path(__file__).with_name("template")
PARTS = {
    "operator.toml": "what it takes and returns",
    "workloads.toml": "on which sizes",
    "reference.py": "the definition, the usual data, and the edge cases",
    "experts/": "honest implementations, at least two",
    "bugs/": "wrong ones that the judge must catch",
}


def lay_out(name: str) -> Iterator[str]:
    """Make the folder here; says what to replace in it."""
    if not NAME.fullmatch(name):
        raise UsageError(f"'{name}' must be letters, digits and underscores: it names the folder and the operator")
    if name in contract.names():
        raise UsageError(f"there is an operator {name} already (justgoal tasks show {name}): give another name")
    folder = Path(name)
    try:
        shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    except FileExistsError:
        raise UsageError(f"{name} exists: give another name, or remove it") from None
    except OSError as error:
        raise UsageError(f"{name} cannot be made: {error.strerror}") from error
    yield f"{name}/ is a toy that already passes. Replace, in this order:"
    width = max(map(len, PARTS))
    yield from (f"  {part:{width}}  {text}" for part, text in PARTS.items())
    yield f"then: justgoal tasks check {name}"

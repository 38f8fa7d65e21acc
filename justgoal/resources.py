"""Where the files beside the package are: at the top of a checkout, or inside the package of a wheel."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def prompts() -> Path:
    """The folder with every word that a model is told."""
    return _folder("prompts")


def sandbox_files() -> Path:
    """The folder with what runs inside the agent's sandbox besides the agent."""
    return _folder("sandbox")


def runs() -> Path:
    """Where runs are written and looked up by default: in the checkout, or in the current folder."""
    return _PACKAGE.parent / "runs" if (_PACKAGE.parent / "pyproject.toml").is_file() else Path.cwd() / "runs"


def notices() -> Mapping[str, str]:
    """The one-line texts that a model is told besides results, by name; fields stand in braces."""
    texts: dict[str, str] = tomllib.loads((prompts() / "notices.toml").read_text(encoding="utf-8"))
    return texts


def _folder(name: str) -> Path:
    inside = _PACKAGE / f"_{name}"
    return inside if inside.is_dir() else _PACKAGE.parent / name

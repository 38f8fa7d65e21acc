"""How a file of ours is written, all of it or nothing, and where what can be measured again is kept."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    temporary.rename(path)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "justgoal"

"""The goal, all that a model is told about its task: four sentences, one a line; and the loop's other words.

The sentences stand in prompts/goal.<language>.md with the placeholders {operator}, {workload}, {device} and
{patience}. A file with other than four is a usage error: runs are comparable because all have the same four.
"""

import re
import tomllib
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from justgoal.errors import UsageError
from justgoal.events import Goal

_END = re.compile(r"[.!?](?=\s|$)|[。！？]")


@dataclass(frozen=True)
class Words:
    """What the loop itself says to a model.

    `continuation` answers a turn without a tool call, `interrupted` a call that was under way when the
    process ended, `cut` a call inside which the response reached its length limit.
    """

    continuation: str
    interrupted: str
    cut: str


def render(prompts: Path, language: str, *, operator: str, workload: str, device: str, patience: int) -> Goal:
    """The goal in words, with its hash."""
    if language not in languages(prompts):
        raise UsageError(f"no goal in language {language!r}: there are {', '.join(languages(prompts))}")
    name = f"goal.{language}.md"
    template = _read(prompts, name).strip()
    _check(f"prompts/{name}", template)
    values = {"operator": operator, "workload": workload, "device": device, "patience": patience}
    try:
        text = template.format_map(values)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        known = ", ".join(f"{{{value}}}" for value in values)
        raise UsageError(f"prompts/{name} has an unknown placeholder ({error}): there are {known}") from error
    return Goal(text, language, sha256(text.encode()).hexdigest())


def languages(prompts: Path) -> list[str]:
    return sorted(file.name.split(".")[1] for file in prompts.glob("goal.*.md"))


def sentences(text: str) -> int:
    """How many sentences a text has, English or Chinese; what a line ends with unfinished is one too."""
    return sum(1 for line in text.splitlines() for part in _END.split(line) if part.strip())


def _check(name: str, template: str) -> None:
    count, lines = sentences(template), template.splitlines()
    if count != 4:
        raise UsageError(f"{name} has {count} sentences; a goal has exactly 4, one a line")
    if [sentences(line) for line in lines] != [1, 1, 1, 1]:
        raise UsageError(f"{name} has 4 sentences on {len(lines)} lines; a goal has exactly 4, one a line")


def words(prompts: Path) -> Words:
    try:
        notices = tomllib.loads(_read(prompts, "notices.toml"))
        return Words(_read(prompts, "continue.md").strip(), notices["interrupted_call"], notices["cut_call"])
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"prompts/notices.toml is no TOML: {error}") from error
    except KeyError as error:
        raise UsageError(f"prompts/notices.toml has no {error}") from error


def _read(prompts: Path, name: str) -> str:
    try:
        return (prompts / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read prompts/{name}: {error}") from error

"""The goal's four sentences in both languages, and the loop's other words."""

import shutil
from hashlib import sha256
from pathlib import Path

import pytest

from justgoal import goal, resources
from justgoal.errors import UsageError
from justgoal.events import Goal

ENGLISH = "\n".join(
    [
        "Measure the expert implementation of top_k_select on long with `evaluate --expert`; "
        "everything about the task is in /task.",
        "Then write in /workspace/solution, from scratch, an implementation that is correct and faster on this cpu.",
        "`evaluate` judges it on random inputs that you never see: its error against a naive high-precision "
        "reference may not exceed the expert's, and its speed is measured beside the expert's.",
        "Go on making it faster until you are stopped, which happens after 20 evaluations in a row "
        "without an improvement.",
    ]
)


def render(prompts: Path, language: str = "en") -> Goal:
    return goal.render(prompts, language, operator="top_k_select", workload="long", device="cpu", patience=20)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resources.prompts(), tmp_path / "prompts"))


def test_the_english_goal_is_this_to_the_letter() -> None:
    rendered = render(resources.prompts())
    assert rendered.text == ENGLISH
    assert rendered.language == "en" and rendered.sha256 == sha256(ENGLISH.encode()).hexdigest()


@pytest.mark.parametrize(("language", "stops"), [("en", "."), ("zh", "。")])
def test_both_languages_have_four_sentences_one_a_line_and_say_the_same_names(language: str, stops: str) -> None:
    text = render(resources.prompts(), language).text
    assert goal.sentences(text) == 4
    assert [goal.sentences(line) for line in text.split("\n")] == [1, 1, 1, 1]
    assert all(line.endswith(stops) for line in text.split("\n"))
    for name in (
        "`evaluate --expert`",
        "`evaluate`",
        "/task",
        "/workspace/solution",
        "top_k_select",
        "long",
        "cpu",
    ):
        assert name in text
    assert "20" in text and "{" not in text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three?", 3),
        ("A file such as solution.py of 1.5 KB; /task.", 1),
        ("Unfinished", 1),
        ("One. And a rest", 2),
        ("第一句。第二句！第三句？", 3),
        ("", 0),
        (" \n\n", 0),
    ],
)
def test_counting_sentences(text: str, count: int) -> None:
    assert goal.sentences(text) == count


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("A.\nB.\nC.\nD.\nE.\n", "has 5 sentences; a goal has exactly 4, one a line"),
        ("A.\nB.\nC. And more.\nD.\n", "has 5 sentences; a goal has exactly 4, one a line"),
        ("A.\nB.\nC.\n", "has 3 sentences; a goal has exactly 4, one a line"),
        ("", "has 0 sentences; a goal has exactly 4, one a line"),
        ("A. B.\nC. D.\n", "has 4 sentences on 2 lines; a goal has exactly 4, one a line"),
        ("A.\n\nB.\nC.\nD.\n", "has 4 sentences on 5 lines; a goal has exactly 4, one a line"),
    ],
)
def test_other_than_four_sentences(prompts: Path, text: str, problem: str) -> None:
    (prompts / "goal.en.md").write_text(text)
    with pytest.raises(UsageError) as caught:
        render(prompts)
    assert str(caught.value) == f"prompts/goal.en.md {problem}"


@pytest.mark.parametrize("placeholder", ["{expert}", "{0}", "{", "{operator.name.x}"])
def test_placeholders_that_do_not_exist(prompts: Path, placeholder: str) -> None:
    (prompts / "goal.en.md").write_text(f"A {placeholder}.\nB.\nC.\nD.\n")
    with pytest.raises(UsageError, match=r"^prompts/goal\.en\.md has an unknown placeholder .*\{patience\}$"):
        render(prompts)


def test_braces_in_a_name_are_left_alone() -> None:
    rendered = goal.render(resources.prompts(), "en", operator="{x}", workload="w", device="cpu", patience=6)
    assert "implementation of {x} on w" in rendered.text and "after 6 evaluations" in rendered.text


def test_an_unknown_language(prompts: Path) -> None:
    with pytest.raises(UsageError, match=r"^no goal in language 'fr': there are en, zh$"):
        render(prompts, "fr")


def test_the_other_words_are_short_lines_about_no_task(prompts: Path) -> None:
    words = goal.words(prompts)
    for line in (words.continuation, words.interrupted, words.cut):
        assert line and line == line.strip() and "\n" not in line and "{" not in line


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("notices.toml", "interrupted_call = ", "prompts/notices.toml is no TOML"),
        ("notices.toml", "", "prompts/notices.toml has no 'interrupted_call'"),
        ("continue.md", None, r"cannot read prompts/continue.md"),
        ("goal.en.md", b"\xff", r"cannot read prompts/goal.en.md"),
    ],
)
def test_damaged_prompts(prompts: Path, name: str, content: str | bytes | None, problem: str) -> None:
    (prompts / name).unlink()
    if content is not None:
        (prompts / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=f"^{problem}"):
        render(prompts)
        goal.words(prompts)

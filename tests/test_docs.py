"""What the documents say about tests."""

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_tests_that_are_named_exist() -> None:
    """Every claim of docs/sandbox.md names a test; no name is wrong."""
    text = (TESTS.parent / "docs" / "sandbox.md").read_text()
    there = {name for file in TESTS.glob("*.py") for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}
    assert set(re.findall(r"`(test_\w+)`", text)) - there == set()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    claims = [row for row in rows if "shown by" not in row]
    assert claims and all("`test_" in row for row in claims)

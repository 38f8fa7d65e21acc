"""The noise certificate: when it is measured and when one from before holds, what it says, whom it refuses."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import CERTIFICATE, circumstances

from justgoal.errors import UsageError
from justgoal.evaluation import certificate
from justgoal.evaluation.certificate import Certificate
from justgoal.evaluation.device import Device
from justgoal.evaluation.improvement import Rule
from justgoal.evaluation.verdict import ExpertReport
from justgoal.sandboxes import Engine

DAY = 24 * 3600


def keep(folder: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, Any] | str) -> None:
    """As the cache folder of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    path = folder / "justgoal" / "noise-cpu.json"
    path.parent.mkdir()
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def written(**changes: Any) -> dict[str, Any]:
    return {**circumstances(), "certificate": {**CERTIFICATE, "made": time.time() - 60, **changes}}


def test_one_from_before_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = written(made=time.time() - DAY + 60)
    keep(tmp_path, monkeypatch, content)
    held = certificate.stored("cpu")
    assert held and held.to_json() == content["certificate"]
    assert certificate.stored("cuda") is None


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(lambda: written(made=time.time() - DAY - 60), id="older than a day"),
        pytest.param(lambda: written(made=time.time() + 60), id="from the future"),
        pytest.param(lambda: {**written(), "boot": "another"}, id="another boot"),
        pytest.param(lambda: {**written(), "justgoal": "0.0.1"}, id="another version"),
        pytest.param(lambda: {**written(), "processor": "another"}, id="another processor"),
        pytest.param(lambda: {**written(), "cores": 1000}, id="another number of cores"),
        pytest.param(lambda: written(more=1), id="a field too many"),
        pytest.param(lambda: {**circumstances(), "certificate": {"made": 1}}, id="fields missing"),
        pytest.param(lambda: "{", id="no JSON"),
        pytest.param(lambda: "[]", id="no object"),
    ],
)
def test_one_that_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any) -> None:
    keep(tmp_path, monkeypatch, content())
    assert certificate.stored("cpu") is None


def test_where_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert certificate.file("cpu") == tmp_path / ".cache" / "justgoal" / "noise-cpu.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert certificate.file("cpu") == tmp_path / "elsewhere" / "justgoal" / "noise-cpu.json"


def test_what_follows_from_the_readings() -> None:
    """Two of twelve pairs are off, by 2 %: three pairs do, (3/26)^3 = 0.0015. Of 24 signed ratios 0.8^(1/3) = 0.928
    are 23, so one of the two bad ones must be overcome: 1.005 * 1.02. 30 us are that much of 1.2 ms."""
    null = {"one": [1.02, 1 / 1.02, *[1.0] * 10], "other": [1.0] * 12}
    made = Certificate.of("cpu", null, {"one": [5e-6], "other": [-30e-6]})
    assert (made.device, made.null, made.rule) == ("cpu", null, Rule(3, 0.005))
    assert made.false_rate == pytest.approx((3 / 26) ** 3)
    assert made.smallest_gain == pytest.approx(1.005 * 1.02 - 1)
    assert made.shortest_latency == pytest.approx(30e-6 / 0.0251)
    assert made.clock_error == pytest.approx(30e-6)
    assert made.spread == 0.0
    assert time.time() - made.made < 60


def test_sentence() -> None:
    noon = time.mktime((2026, 11, 30, 14, 2, 0, 0, 0, -1))
    said = Certificate(**{**CERTIFICATE, "made": noon, "smallest_gain": 0.0182, "shortest_latency": 0.00043}).sentence()
    assert said == "gains from 1.8 % are found here, calls from 430 us (certificate of 14:02)"


def test_a_task_that_is_too_short_is_refused_by_name_and_figure() -> None:
    held = Certificate(**{**CERTIFICATE, "shortest_latency": 0.00107})
    held.admit("a/b", ExpertReport({"eager": 0.00107}, {}, "eager", ()))
    with pytest.raises(UsageError) as refused:
        held.admit("a/b", ExpertReport({"eager": 0.0002, "slow": 1.0}, {}, "eager", ()))
    assert str(refused.value) == (
        "a/b is too short for this machine: its expert takes 200 us, and calls can be told apart from 1.07 ms"
        " (justgoal doctor)"
    )


@pytest.mark.thorough
@pytest.mark.slow
def test_measured_once(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By real judges on both probes; the second time it is read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "made"))
    with Device().exclusive():
        first = certificate.current(engine, "cpu")
        assert {name: len(ratios) for name, ratios in first.null.items()} == {"softmax": 12, "product": 12}
        assert {name: len(errors) for name, errors in first.clock.items()} == {"softmax": 6, "product": 6}
        assert all(0.2 < ratio < 5 for ratios in first.null.values() for ratio in ratios)
        assert all(abs(error) < 0.005 for errors in first.clock.values() for error in errors)
        assert first.false_rate <= 0.003
        begun = time.monotonic()
        assert certificate.current(engine, "cpu") == first
        assert time.monotonic() - begun < 1

"""What a tool call costs: `echo hi` through the bash tool, and with both transcript lines on disk.

python benchmarks/tool_call.py        as root; half a minute; both engines, where they are there
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from justgoal.errors import JustgoalError
from justgoal.events import ToolCall, ToolResult
from justgoal.sandboxes import UID, Engine, Limits, Spec, engines, mounts
from justgoal.sandboxes.shell import Shell, agent_spec
from justgoal.tools import Tools
from justgoal.transcript import Transcript

CALLS = 300
STARTS = 10
INPUT = {"command": "echo hi"}


def main() -> None:
    for name in ("bubblewrap", "docker"):
        try:
            engine = engines.choose(name)
        except JustgoalError as error:
            print(f"{name}: {error}")
        else:
            with closing(engine):
                measure(engine)


def measure(engine: Engine) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mounts.own_folder(folder / "run" / "workspace", UID)
        task = mounts.stage_tree(Path(__file__).parents[1] / "prompts")
        spec = agent_spec(folder / "run" / "workspace", task, None, Limits(1 << 30, 256, 2), UID)
        print(f"{f'{engine.name} {engine.version}':36} {'median':>10} {'p90':>10}")
        report("start of the agent's sandbox", [start(engine, spec) for _ in range(STARTS)])
        with closing(engine.start(spec)) as sandbox:
            tools = Tools(Shell(sandbox, None))
            report("bash: echo hi", repeat(lambda: tools.execute("bash", INPUT)))
            with closing(Transcript.open(folder / "events.jsonl")) as transcript:
                report("bash: echo hi, both lines on disk", repeat(lambda: recorded(tools, transcript)))
            action = {"command": "view", "path": "/task/tools.json"}
            report("file tool: view", repeat(lambda: tools.execute("str_replace_based_edit_tool", action)))
            report("freeze and thaw", repeat(lambda: (sandbox.freezer.freeze(), sandbox.freezer.thaw())))


def start(engine: Engine, spec: Spec) -> float:
    """Seconds until a new sandbox's shell is ready."""
    began = time.perf_counter()
    with closing(engine.start(spec)) as sandbox:
        Shell(sandbox, None).run("true", 10)
        return time.perf_counter() - began


def recorded(tools: Tools, transcript: Transcript) -> None:
    transcript.write(ToolCall("call", "bash", INPUT))
    began = time.perf_counter()
    outcome = tools.execute("bash", INPUT)
    transcript.write(ToolResult("call", outcome.content, outcome.is_error, time.perf_counter() - began))


def repeat(action: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(CALLS):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return seconds


def report(label: str, seconds: list[float]) -> None:
    p90 = statistics.quantiles(seconds, n=10)[-1]
    print(f"{label:36} {statistics.median(seconds) * 1e3:7.2f} ms {p90 * 1e3:7.2f} ms")


if __name__ == "__main__":
    main()

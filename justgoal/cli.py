"""The command line: parse, call, print. Errors that are raised on purpose become one line on stderr here.

Exit codes: 0 finished, 2 usage, 3 resumable (the same command goes on), 4 refused by the model, 5 cannot
go on. What is heavy is imported inside the commands, so that help and `show` start at once; torch never is.
"""

import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal, NoReturn

import typer

from justgoal import __version__, resources
from justgoal.errors import JustgoalError
from justgoal.terminal import View, harmless, one_line

INTERRUPTED = 130

app = typer.Typer(
    name="justgoal",
    help="Give a language model one operator and a goal of four sentences; judge what it makes of it.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
tasks = typer.Typer(help="What there is to work on.", rich_markup_mode=None)
app.add_typer(tasks, name="tasks")
sandbox = typer.Typer(help="Images for sandboxes.", rich_markup_mode=None)
app.add_typer(sandbox, name="sandbox")

EngineName = Annotated[
    Literal["docker", "bubblewrap"] | None,
    typer.Option(
        "--engine", metavar="docker|bubblewrap", help="What makes the sandboxes.  [default: Docker where it answers]"
    ),
]
Image = Annotated[
    str | None, typer.Option(metavar="NAME", help="Docker image to use instead of this machine's own system.")
]
Runs = Annotated[Path | None, typer.Option(metavar="DIR", help="Where runs are.  [default: ./runs]")]


@app.callback(invoke_without_command=True)
def justgoal(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"justgoal {__version__}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


@app.command()
def run(
    task: Annotated[str, typer.Argument(metavar="OPERATOR[/WORKLOAD]", help="The first workload if none is named.")],
    model: Annotated[str, typer.Option(metavar="MODEL", help="Such as claude-opus-5-5, or recorded:RUN.")],
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the run; one that exists goes on.")] = None,
    runs: Runs = None,
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Another server that speaks the Messages API.")
    ] = None,
    language: Annotated[Literal["en", "zh"], typer.Option(metavar="en|zh", help="Language of the goal.")] = "en",
    patience: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Stop after N evaluations in a row without improvement.  [default: 20 or the recording's]",
        ),
    ] = None,
    max_hours: Annotated[float | None, typer.Option(metavar="H", min=0, help="Stop after H hours of work.")] = None,
    max_turns: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Stop after N responses of the model.")
    ] = None,
    engine: EngineName = None,
    image: Image = None,
) -> None:
    """Let a model work on a task until the stop rule ends the run."""
    from justgoal import run as runtime

    options = runtime.RunOptions(
        model=model,
        task=task,
        name=name,
        runs=runs or default_runs(),
        base_url=base_url,
        language=language,
        patience=patience,
        max_hours=max_hours,
        max_turns=max_turns,
        engine=engine,
        image=image,
    )
    raise typer.Exit(runtime.run(options, View(sys.stdout)))


@app.command()
def evaluate(
    solution: Annotated[Path, typer.Argument(metavar="SOLUTION", help="A folder with solution.py.")],
    task: Annotated[str, typer.Option(metavar="OPERATOR[/WORKLOAD]", help="What it is a solution of.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole verdict as JSON.")] = False,
    engine: EngineName = None,
    image: Image = None,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(metavar="cpu|cuda", help="What it runs on: the first GPU, for cuda.")
    ] = "cpu",
) -> None:
    """Judge a solution as in a run, without a model."""
    from justgoal import run as runtime

    raise typer.Exit(runtime.evaluate(solution, task, as_json, engine, image, device))


@app.command()
def doctor(
    runs: Runs = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out what takes more than two seconds: torch.compile, the noise.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Is a run possible on this machine, and how small a gain can it tell? Exits 2 when no run is possible."""
    from justgoal import doctor as checks

    raise typer.Exit(checks.doctor(View(sys.stdout), runs or default_runs(), quick=quick, as_json=as_json))


@app.command()
def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.")], runs: Runs = None
) -> None:
    """Sum up a run, finished or not."""
    from justgoal import show as summary
    from justgoal.transcript import find_run

    summary.show(find_run(run, runs or default_runs()), sys.stdout)


@tasks.command("list")
def list_tasks() -> None:
    """All operators and their workloads."""
    from justgoal import listing

    say(listing.overview())


@tasks.command("show")
def show_task(operator: Annotated[str, typer.Argument(metavar="OPERATOR", help="Name or folder.")]) -> None:
    """One operator: arguments, outputs, workloads, experts."""
    from justgoal import listing

    say(listing.operator(operator))


@tasks.command("new")
def new_task(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits and underscores: a folder to make.")],
) -> None:
    """Lay out a folder for an operator of your own."""
    from justgoal.tasks import new

    say(new.lay_out(name))


@tasks.command("check")
def check_tasks(
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="[OPERATOR[/WORKLOAD]]", help="All workloads if none is named.  [default: the catalogue]"
        ),
    ] = None,
    engine: EngineName = None,
    image: Image = None,
) -> None:
    """Does the judge catch what is known to be wrong? Exits 2 for a task that is too weak to run."""
    from justgoal import checks

    checks.check(task, View(sys.stdout), engine, image)


@sandbox.command("build")
def build_sandbox(
    base: Annotated[str | None, typer.Option(metavar="IMAGE", help="What to build on.  [default: NVIDIA's]")] = None,
    tag: Annotated[str, typer.Option(metavar="NAME", help="What to call it.")] = "justgoal-sandbox",
) -> None:
    """Make a Docker image with a CUDA system of its own, for --image."""
    from justgoal.sandboxes import images

    say(images.build(resources.sandbox_files(), tag, base))


@app.command()
def clean() -> None:
    """Remove what runs that were killed left on this machine, and what can be made again."""
    from justgoal.sandboxes import leftovers

    say(leftovers.clean())


def default_runs() -> Path:
    """./runs where there is one, otherwise the checkout's."""
    here = Path("runs")
    return here if here.is_dir() else resources.runs()


def say(lines: Iterable[str]) -> None:
    for line in lines:
        print(harmless(line))


def fail(text: str, code: int) -> NoReturn:
    print(f"error: {one_line(text)}", file=sys.stderr)
    sys.exit(code)


def usage(error: typer.TyperException) -> str:
    """Typer's own words as one of our lines: `missing option '--model' (justgoal run --help)`."""
    text = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{text[:1].lower()}{text[1:]} ({context.command_path if context else 'justgoal'} --help)"


def end_in_order() -> None:
    """SIGTERM, and the end of the terminal unless it is ignored, end a command as Ctrl-C does: nothing is left."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)


def main() -> None:
    end_in_order()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a user's locale may be ASCII
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()  # here, where a reader that has gone is no more than that
        sys.exit(code)
    except JustgoalError as error:
        fail(str(error), error.exit_code)
    except typer.TyperException as error:
        fail(usage(error), 2)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has gone; without this Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)

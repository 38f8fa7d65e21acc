"""Every error that justgoal raises on purpose; its text is shown to the user as it is.

    JustgoalError
    ├── UsageError          exit 2: the command line, or a file that it names, is wrong; nothing was written
    ├── Resumable           exit 3: stopped in a state from which the same command goes on
    ├── Refused             exit 4: the model refused to work on the goal
    └── Fatal               exit 5: cannot go on, and the text says why
        ├── SandboxLost     a sandbox ended although nobody closed it
        └── EvaluatorFailed the judge or a trusted worker failed: nobody's solution is to blame

`StopRun` is no error: the runtime's own rules raise it to end a tool call and the run.
"""


class JustgoalError(Exception):
    exit_code = 5


class UsageError(JustgoalError):
    exit_code = 2


class Resumable(JustgoalError):
    exit_code = 3


class Refused(JustgoalError):
    exit_code = 4


class Fatal(JustgoalError):
    exit_code = 5


class SandboxLost(Fatal):
    pass


class EvaluatorFailed(Fatal):
    pass


class StopRun(Exception):
    """The run is over: `status` is one of the statuses in state.py, `detail` one line for the summary."""

    def __init__(self, status: str, detail: str = "") -> None:
        super().__init__(f"{status}: {detail}" if detail else status)
        self.status = status
        self.detail = detail
        self.output = ""

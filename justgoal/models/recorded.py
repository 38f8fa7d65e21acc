"""A model that answers with the responses of an earlier run, in order, whatever it is asked.

Nothing is sampled, so nothing is used: every usage is empty. Tool calls keep their recorded ids; what the
tools answer this time may differ from then, and the recording does not notice.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from justgoal.errors import StopRun
from justgoal.events import Event, Json, Response, RunStarted
from justgoal.transcript import find_run, read


class Recorded:
    """`run` is a run's folder or its name in `runs`; `run_json` is what the recording says about itself.

    The recording is verified as a whole at the start, then read again, a response at a time, as it is played.
    """

    def __init__(self, run: str, runs: Path) -> None:
        self.folder = find_run(run, runs)
        self.name = f"recorded:{self.folder.resolve().name}"
        self.parameters: Mapping[str, Any] = {}
        self.run_json: Json = {}
        self.length = 0
        for record in read(self.folder / "events.jsonl"):
            if isinstance(record.event, RunStarted):
                self.run_json = record.event.run
            self.length += isinstance(record.event, Response)
        self._position = 0
        self._responses = self._open()

    def _open(self) -> Generator[Response, None, None]:
        for record in read(self.folder / "events.jsonl"):
            if isinstance(record.event, Response):
                yield record.event

    def query(
        self, number: int, messages: list[Json], tools: list[Json], on_event: Callable[[Event], None]
    ) -> Response:
        """The recorded response `number`; a resumed run begins in the middle."""
        if number > self.length:
            raise StopRun("recording_ended", f"all {self.length} responses of {self.name} have been played")
        while self._position < number:
            response = next(self._responses)
            self._position += 1
        return replace(response, number=number, usage={}, seconds=0.0)

    def close(self) -> None:
        self._responses.close()

"""The one retry policy of all models: which failures are waited out, for how long, and what ends a run.

A protocol module turns whatever its client raises into `AttemptError`; what follows from it is decided here.
"""

import random
import time
from collections.abc import Callable
from typing import NoReturn

import tenacity

from justgoal.errors import Fatal, JustgoalError, Resumable
from justgoal.events import Event, Response, Retry

PATIENCE = 6 * 3600.0
"""Seconds for which a request is tried again; after that the run pauses."""
LONGEST_WAIT = 300.0
LONGEST_HINT = 900.0
"""Seconds at most that a server's retry-after is followed for: absurd ones have been seen (49 days)."""

TRANSIENT_KINDS = {
    "api_error",
    "connection",
    "incomplete",
    "overloaded_error",
    "rate_limit_error",
    "timeout_error",
}
"""Types of the protocol, which decide whatever the status (an error in mid-stream has status 200), and ours:
`connection` is a failure below the protocol, `incomplete` an answer that is not whole."""
TRANSIENT_STATUSES = {408, 409, 429}
NEEDS_A_PERSON = {
    "contract_spend_limit_reached",
    "enforced_spend_limit_reached",
    "linked_organization_spend_limit_reached",
}
"""Codes of a 429 that no waiting ends."""


class AttemptError(Exception):
    """An attempt at a request failed.

    `kind` is the protocol's type of error or ours, `code` its finer one, `wait` the server's hint in seconds.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        request_id: str | None = None,
        wait: float | None = None,
    ) -> None:
        super().__init__(f"{kind}: {' '.join(message.split())[:1000]}")
        self.kind = kind
        self.status = status
        self.code = code
        self.request_id = request_id
        self.wait = wait


def persist(
    attempt: Callable[[], Response],
    number: int,
    on_event: Callable[[Event], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Response:
    """The response of the first attempt that succeeds; each one that fails is reported before the wait."""
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        wait=_wait,
        stop=_out_of_patience,
        sleep=sleep,
        before_sleep=lambda state: on_event(_retry(number, state)),
        retry_error_callback=_give_up,
    )
    try:
        return attempts(attempt)
    except AttemptError as failure:
        raise _ending(failure) from failure


def is_transient(error: BaseException) -> bool:
    if not isinstance(error, AttemptError) or error.code in NEEDS_A_PERSON:
        return False
    return (
        error.kind in TRANSIENT_KINDS
        or error.status in TRANSIENT_STATUSES
        or (error.status is not None and error.status >= 500)
    )


def _ending(failure: AttemptError) -> JustgoalError:
    """What ends the run when trying again is no use."""
    if failure.code in NEEDS_A_PERSON or failure.status == 402:
        return Resumable(f"the account cannot pay for more requests ({failure}); start the same command once it can")
    if failure.status in (401, 403):
        return Resumable(
            f"the model's server does not accept the API key ({failure.status}, {failure}); "
            "start the same command with one that it accepts"
        )
    if failure.status == 404:
        return Fatal(f"the model's server does not know this model or address ({failure.status}, {failure})")
    return Fatal(f"the model's server rejected the request ({failure.status}, {failure})")


def _failure(state: tenacity.RetryCallState) -> AttemptError:
    error = state.outcome.exception() if state.outcome else None
    assert isinstance(error, AttemptError)
    return error


def _wait(state: tenacity.RetryCallState) -> float:
    """2 s, doubled up to 5 minutes, or the server's hint if that is longer than 2 s; plus a random tenth."""
    hint = _failure(state).wait
    wait = min(2.0 * 2.0 ** min(state.attempt_number - 1, 20), LONGEST_WAIT)
    if hint is not None:
        wait = min(max(hint, 2.0), LONGEST_HINT)
    return wait * random.uniform(1.0, 1.1)


def _out_of_patience(state: tenacity.RetryCallState) -> bool:
    return max(state.seconds_since_start or 0.0, state.idle_for) >= PATIENCE


def _retry(number: int, state: tenacity.RetryCallState) -> Retry:
    failure = _failure(state)
    wait = round(state.next_action.sleep if state.next_action else 0.0, 3)
    return Retry(number, state.attempt_number, str(failure), failure.status, wait, failure.request_id)


def _give_up(state: tenacity.RetryCallState) -> NoReturn:
    failure = _failure(state)
    raise Resumable(
        f"no answer from the model's server for {PATIENCE / 3600:.0f} hours, at last {failure}; "
        "start the same command to go on"
    ) from failure

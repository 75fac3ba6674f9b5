"""What can go wrong in the engine, as events. The server alone maps them to HTTP.

EngineError
├─ StartFailed        the process cannot serve: one clear line, exit status 2
│  ├─ ModelMissing    no such file, or the bundled weights are not installed
│  ├─ WeightsInvalid  damaged, truncated or of an unsupported kind; names file and tensor
│  └─ ListenFailed    port or socket in use
├─ RequestInvalid     the caller's to mend: 400 (404, 413, …) with the path of the field
├─ Overloaded         too many requests wait already
├─ TooLate            the first token would come after the request's deadline: 429
├─ NotReady           loading or shutting down
└─ RequestFailed      this request failed inside the engine; the engine goes on
"""

from pathlib import Path


class EngineError(Exception):
    """Never raised itself. The message says what to do next and is safe to show."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class StartFailed(EngineError):
    """Never raised itself: the family of errors that end the process with status 2."""


class ModelMissing(StartFailed):
    pass


class WeightsInvalid(StartFailed):
    """`tensor` is None when the damage is in the header."""

    def __init__(self, path: Path, problem: str, *, tensor: str | None = None) -> None:
        where = f"{path}: tensor {tensor}" if tensor else str(path)
        super().__init__(f"{where}: {problem}")
        self.path = path
        self.tensor = tensor


class ListenFailed(StartFailed):
    pass


class RequestInvalid(EngineError):
    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_request",
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class Overloaded(EngineError):
    pass


class TooLate(EngineError):
    """The answer would begin after its deadline."""

    def __init__(self, expected_s: float, deadline_s: float) -> None:
        super().__init__(
            f"the first token is expected in {expected_s:.1f} s, after the deadline of "
            f"{deadline_s:g} s; retry later or with more time"
        )
        self.retry_after_s = max(1.0, expected_s - deadline_s)


class NotReady(EngineError):
    pass


class RequestFailed(EngineError):
    pass

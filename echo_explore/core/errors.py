"""Errors that users see.

EchoError
├── SpecError (ValueError)             a file, flag or argument is wrong; exit code 2
│   └── UnitError                      a quantity without a unit, or with the wrong one
├── InfeasibleCandidate                the candidate is well formed but cannot run
│   ├── PlacementError (ValueError)    degrees, GPUs and nodes do not fit together
│   └── OutOfDeviceMemory              it needs more memory than a GPU has
├── TraceError                         the ex-situ tracer could not run the program
├── MissingCalibration (LookupError)   no coefficients for this device and no fallback allowed
├── MissingExtra (ImportError)         an optional dependency is not installed
└── StudyError (ValueError)            a ledger or study does not belong to this search

A message is one line: field and value, the rule broken, the fix.
"""


class EchoError(Exception):
    """Base of every error that the package raises on purpose."""


class SpecError(EchoError, ValueError):
    """A file, flag or argument is wrong."""

    def __init__(self, field: str, value: object, rule: str, fix: str) -> None:
        self.field, self.value, self.rule, self.fix = field, value, rule, fix
        shown = repr(value) if isinstance(value, str) else str(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{field} = {shown}: {rule}; fix: {fix}".replace("\n", " "))

    def __reduce__(self) -> tuple[type["SpecError"], tuple[str, object, str, str]]:
        return type(self), (self.field, self.value, self.rule, self.fix)


class UnitError(SpecError):
    """A quantity without a unit, or with the wrong one."""


class InfeasibleCandidate(EchoError):
    """The candidate is well formed but cannot run."""


class PlacementError(InfeasibleCandidate, SpecError):
    """Degrees, GPUs and nodes do not fit together."""


class OutOfDeviceMemory(InfeasibleCandidate):
    """The candidate needs more memory than a GPU has."""


class TraceError(EchoError):
    """The ex-situ tracer could not run the program."""


class MissingCalibration(EchoError, LookupError):
    """No coefficients for this device and no fallback allowed."""


class MissingExtra(EchoError, ImportError):
    """An optional dependency is not installed; names the pip command that brings it."""

    def __init__(self, what: str, extra: str) -> None:
        self.what, self.extra = what, extra
        super().__init__(f"{what} needs packages that are not installed; fix: pip install 'echo-explore[{extra}]'")

    def __reduce__(self) -> tuple[type["MissingExtra"], tuple[str, str]]:
        return type(self), (self.what, self.extra)


class StudyError(SpecError):
    """A ledger or study does not belong to this search."""

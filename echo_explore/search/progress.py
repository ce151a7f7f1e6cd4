"""The progress line on stderr: what is known, how fast it goes, how long it may take. Only the driver prints it."""

import threading
import time
from dataclasses import dataclass
from typing import Final, TextIO

from echo_explore.core import format_seconds

_TTY_PERIOD_S: Final = 0.5
_LOG_PERIOD_S: Final = 10.0
_QUIET_S: Final = 0.8
"""Nothing is printed before: what is refused by then is refused with one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressState:
    """What the line shows.

    Attributes:
        num_left: evaluations that may still be due; None while that is unknown.
        incumbent: the best so far, as people read it; empty while there is none.
    """

    num_evaluated: int = 0
    num_bounded: int = 0
    num_failed: int = 0
    num_left: int | None = None
    num_workers: int = 0
    num_running: int = 0
    num_traces_made: int = 0
    num_traces_wanted: int = 0
    incumbent: str = ""


class Progress:
    """Prints one line that is rewritten on a terminal and repeated every 10 s elsewhere; a thread keeps it alive."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._start_s = time.monotonic()
        self._phase = "starting"
        self._state = ProgressState()
        self._first: tuple[float, int] | None = None
        self._width = 0
        self._printed_s: float | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def start(self, phase: str) -> None:
        """Print the first line if this takes longer than a moment, and keep printing."""
        self._phase = phase
        self._thread.start()

    def phase(self, text: str) -> None:
        """Say what is being done now."""
        with self._lock:
            self._phase = text
            if self._printed_s is not None:
                self._print()

    def update(self, state: ProgressState) -> None:
        """Show these numbers from now on."""
        with self._lock:
            self._state = state
            if self._first is None and state.num_evaluated:
                self._first = (time.monotonic(), state.num_evaluated)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        with self._lock:
            self._clear()
            self._write(text + "\n")

    def close(self) -> None:
        """Print the last numbers and stop."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            if self._printed_s is None and self._state == ProgressState():
                return
            self._print()
            if self._is_terminal:
                self._write("\n")

    def _run(self) -> None:
        period_s = _QUIET_S
        while not self._stop.wait(period_s):
            period_s = _TTY_PERIOD_S if self._is_terminal else 1.0
            with self._lock:
                printed_s = self._printed_s
                if self._is_terminal or printed_s is None or time.monotonic() - printed_s >= _LOG_PERIOD_S:
                    self._print()

    def _print(self) -> None:
        self._printed_s = time.monotonic()
        text = self._text()
        if self._is_terminal:
            self._write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._write(text + "\n")

    def _clear(self) -> None:
        if self._is_terminal and self._width:
            self._write("\r" + " " * self._width + "\r")
            self._width = 0

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # nobody reads stderr any more: the search goes on
            self._stop.set()

    def _text(self) -> str:
        state, elapsed_s = self._state, time.monotonic() - self._start_s
        parts = [f"[{elapsed_s:5.0f} s] {self._phase}"]
        if state.num_running and not state.num_evaluated:
            parts.append(self._waiting_for())
        if state.num_traces_wanted:
            parts.append(f"traces {state.num_traces_made}/{state.num_traces_wanted}")
        if state.num_evaluated or state.num_bounded or state.num_running:
            parts.append(f"evaluated {state.num_evaluated:,}")
            parts.append(f"bounded away {state.num_bounded:,}")
        if state.num_failed:
            parts.append(f"failed {state.num_failed}")
        parts += self._rate()
        if state.incumbent:
            parts.append(f"best {state.incumbent}")
        return " | ".join(parts)

    def _waiting_for(self) -> str:
        """What keeps the first evaluation waiting."""
        if not self._state.num_workers:
            return "starting workers"
        if self._state.num_traces_made < self._state.num_traces_wanted:
            return "tracing"
        return "first evaluations; where nothing is compiled yet, they compile"

    def _rate(self) -> list[str]:
        """Evaluations a second since the first, and the time that the rest would take at that rate."""
        if self._first is None:
            return []
        since_s = time.monotonic() - self._first[0]
        done = self._state.num_evaluated - self._first[1]
        if since_s < 0.5 or done <= 0:
            return []
        rate = done / since_s
        parts = [f"{rate:.1f}/s"]
        if self._state.num_left:
            parts.append(f"at most {format_seconds(self._state.num_left / rate)} left")
        return parts

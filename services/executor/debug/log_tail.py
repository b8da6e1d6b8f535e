"""Keeps the last lines of a rank's log where they survive it."""

from typing import TextIO

from services.executor.debug.recorder import RankRecorder


class RecordedStream:
    """A text stream that hands on what is written to it, and keeps its lines in the flight recorder."""

    def __init__(self, stream: TextIO, recorder: RankRecorder) -> None:
        self._stream = stream
        self._recorder = recorder
        self._begun = ""

    def write(self, text: str) -> int:
        *whole, self._begun = (self._begun + text).split("\n")
        for line in whole:
            if line.strip():
                self._recorder.line(line)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

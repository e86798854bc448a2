"""Texts that end a reply, wherever the tokens and chunks are cut."""

from collections.abc import Sequence


class StopScanner:
    """Lets text through up to the first stop text; holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held: str = ""
        self.found: str = ""
        """The stop text that ended it."""

    def push(self, text: str) -> str:
        """Take more text; return what is certainly before any stop text."""
        if self.found:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        places = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            at, self.found = min(places, key=lambda place: (place[0], -len(place[1])))
            self._held = ""
            return text[:at]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """Return what was held back: no more comes."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop text."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0

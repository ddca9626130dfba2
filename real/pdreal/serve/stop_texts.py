"""Texts that end an answer: found across tokens, and never sent."""

from collections.abc import Sequence


class StopTexts:
    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        """Text that may be the beginning of one."""

    def add(self, text: str) -> tuple[str, str | None]:
        """Text that can be sent now; and the stop text behind it, if one is complete."""
        if not self._stops:
            return text, None
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda place: (place[0], -len(place[1])))
            self._held = ""
            return text[:at], stop
        begin = next(at for at in range(len(text) + 1) if any(stop.startswith(text[at:]) for stop in self._stops))
        self._held = text[begin:]
        return text[:begin], None

    def rest(self) -> str:
        """Text that was held back, when nothing comes behind it."""
        held, self._held = self._held, ""
        return held

"""Progress on a terminal is one line that goes away; elsewhere a plain line now and then; for a library, nothing."""

from __future__ import annotations

import io

import pytest

from rhymerl.progress import ProgressBar, ShownProgressBar, about, counted, rate


class Stream(io.StringIO):
    """Text, as of a terminal or of a file."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(*, is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[ShownProgressBar, Stream, Clock]:
    monkeypatch.setenv("TERM", "xterm")
    stream, clock = Stream(is_terminal=is_terminal), Clock()
    return ShownProgressBar(stream, clock=clock), stream, clock


def test_a_line_on_a_terminal_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream, clock = shown(is_terminal=True, monkeypatch=monkeypatch)
    with progress.during("answers", 2000):
        assert stream.getvalue() == "\ranswers: 0 of 2,000\x1b[K"
        progress.advance(400)
        assert "400" not in stream.getvalue(), "it was drawn just now"
        clock.now = 10.0
        progress.advance(600)
        assert stream.getvalue().endswith("\ranswers: 1,000 of 2,000, 60 a second, about 17 s left\x1b[K")
    assert stream.getvalue().endswith("\r\x1b[K")
    assert "\n" not in stream.getvalue()


def test_plain_lines_elsewhere_and_none_for_what_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream, clock = shown(is_terminal=False, monkeypatch=monkeypatch)
    with progress.during("answers", 4):
        for clock.now in (10.0, 31.0, 40.0):
            progress.advance()
    assert stream.getvalue() == "answers: 2 of 4, 2.9 a minute, about 42 s left\n"


def test_the_time_left_is_told_when_enough_is_done_and_counts_from_the_first_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of many answers comes after an engine has started, and says nothing about the others."""
    progress, stream, clock = shown(is_terminal=True, monkeypatch=monkeypatch)
    with progress.during("answers", 512):
        for clock.now in range(31, 56):
            progress.advance()
            assert "left" not in stream.getvalue()
        clock.now += 1
        progress.advance()
        assert stream.getvalue().endswith("\ranswers: 26 of 512, 1.0 a second, about 8 min left\x1b[K")


def test_a_note_stands_behind_the_count_until_something_else_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream, clock = shown(is_terminal=True, monkeypatch=monkeypatch)
    with progress.during("answers", 40):
        progress.note(lambda: f", {int(clock.now)} wait for replies")
        clock.now = 7.0
        progress.advance()
        assert stream.getvalue().endswith("\ranswers: 1 of 40, 7 wait for replies\x1b[K")
    with progress.during("samples", 40):
        assert stream.getvalue().endswith("\rsamples: 0 of 40\x1b[K")


def test_an_error_leaves_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream, _ = shown(is_terminal=True, monkeypatch=monkeypatch)
    with pytest.raises(KeyError), progress.during("loading"):
        raise KeyError
    assert stream.getvalue() == "\rloading ...\x1b[K\r\x1b[K"


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Stream(is_terminal=True)
    with ShownProgressBar(stream).during("loading"):
        pass
    assert stream.getvalue() == ""


def test_what_is_not_begun_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream, clock = shown(is_terminal=True, monkeypatch=monkeypatch)
    clock.now = 100.0
    progress.advance()
    progress.end()
    assert stream.getvalue() == ""


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressBar()
    with progress.during("answers", 4):
        progress.advance()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.1, "about 1 s"),
        (42.4, "about 42 s"),
        (100, "about 2 min"),
        (5000, "about 83 min"),
        (11990, "about 3 h 20 min"),
    ],
)
def test_times_as_people_say_them(seconds: float, words: str) -> None:
    assert about(seconds) == words


def test_a_number_with_its_noun():
    assert [counted(each, "seed") for each in (0, 1, 2048)] == ["0 seeds", "1 seed", "2,048 seeds"]


@pytest.mark.parametrize(
    ("per_second", "words"),
    [(1234.4, "1,234 a second"), (2.5, "2.5 a second"), (0.2, "12 a minute"), (0.01, "0.6 a minute")],
)
def test_rates(per_second: float, words: str) -> None:
    assert rate(per_second) == words


def test_what_has_no_known_end_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, stream, clock = shown(is_terminal=True, monkeypatch=monkeypatch)
    with progress.during("rows"):
        assert stream.getvalue().endswith("\rrows ...\x1b[K")
        clock.now = 1.0
        progress.advance(1500)
        assert stream.getvalue().endswith("\rrows: 1,500\x1b[K")

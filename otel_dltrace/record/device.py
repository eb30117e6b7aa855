"""What a recorder needs of whoever knows when the device was at something; it knows no device."""

from typing import Any, Protocol

Mark = Any
"""A place in the device's work, whose time is known when the device has come there."""


class DeviceTimes(Protocol):
    """Finds out when the device was at what is recorded, without making anybody wait.

    What returns whether it is followed means: the span says so by ``Flag.DEVICE``, and an AMEND will come.
    """

    def meet(self, model: set[int]) -> None:
        """Know that a *model* is on these devices: its stages have no times of others."""

    def mark(self, elsewhere: bool = False) -> Mark | None:
        """Return a mark before what is asked of the device next; None where there can be none now.

        All else is called by the thread that trains, but for what says so; only then is the device asked anything.
        """

    def piece(self, number: int, step: int, nth: int, begun: Mark) -> bool:
        """Know that the *nth* piece of the stage span *number* in *step* ends; return whether it is followed."""

    def drop(self, number: int) -> None:
        """Know that a piece of the stage span *number* has no mark: it is not followed. Any thread may call this."""

    def operation(self, number: int, step: int, begun: Mark) -> bool:
        """Know that the device goes on when the operation span *number* is done; return whether it is followed.

        This and `waited` may be called by any thread.
        """

    def waited(self, number: int, step: int, begun: Mark, asked: Mark) -> bool:
        """Know that the device, *asked* to wait for the operation span *number*, goes on when that is done.

        Return whether it is followed.
        """

    def is_open(self) -> bool:
        """Return whether a device may be asked anything now. Any thread may call this."""

    def when(self, mark: Mark) -> int | None:
        """Return when the device passed *mark*, monotonic ns of the host; None where that is not known yet."""

    def step_ends(self) -> None:
        """Write what has become known; know that the stages of the step so far have no more pieces."""

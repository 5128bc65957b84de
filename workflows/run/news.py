"""What wakes the loop that keeps dispatch up to date."""


class News:
    """Whether dispatch needs an update. Every change of what a `Control` holds wakes it."""

    def __init__(self) -> None:
        self.pending = False

    def wake(self) -> None:
        """Marks that something is new."""
        self.pending = True

    def take(self) -> None:
        """Clears the mark: all that is new is about to be sent."""
        self.pending = False

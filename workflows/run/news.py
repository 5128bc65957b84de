"""What wakes the loop that keeps dispatch informed."""


class News:
    """Whether dispatch is to hear of something. Whoever changes what a `Control` says wakes it."""

    def __init__(self) -> None:
        self.pending = False

    def wake(self) -> None:
        """Something is new."""
        self.pending = True

    def take(self) -> None:
        """All that is new is about to be sent."""
        self.pending = False

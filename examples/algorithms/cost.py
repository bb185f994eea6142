"""What a run keeps below a limit: a cost is a function like a reward."""


def length(texts: list[str]) -> list[float]:
    """Length of a response in characters, as a share of 50."""
    return [min(len(text) / 50, 1.0) for text in texts]

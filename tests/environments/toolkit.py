"""A tool of the user's own, as a function."""


def plus(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: One of them.
        b: The other one.

    Returns:
        Their sum.
    """
    return a + b

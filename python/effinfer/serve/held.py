"""Text that cannot be given on yet."""


def held_back(text: str, tag: str) -> int:
    """Length of the longest tail of `text` that begins `tag`."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0

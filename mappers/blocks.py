"""How many rows are worked on at a time, number by number: as many as stay in a core's cache."""

import torch

BLOCK_NUMBERS = 1 << 17


def block_tokens(width: int, chunk_tokens: int, device: torch.device) -> int:
    """Of rows of so many numbers, of a chunk: a part of it on a CPU, all of it on a GPU."""
    if device.type != "cpu":
        return chunk_tokens
    return min(chunk_tokens, max(1, BLOCK_NUMBERS // width))

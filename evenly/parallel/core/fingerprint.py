"""One number for what a tensor holds, to compare tensors of several ranks, or one with what it was."""

from __future__ import annotations

import torch

WORDS_AT_ONCE = 1 << 16


def fingerprint(tensor: torch.Tensor) -> int:
    """A number that depends on a tensor's elements and their order; another tensor hardly has the same."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return fingerprint_of_bytes(real.detach().contiguous().flatten().view(torch.uint8))


def fingerprint_of_bytes(content: torch.Tensor) -> int:
    """The fingerprint of bytes, 1D: words weigh by their places."""
    if content.storage_offset() % 8:
        content = content.clone()
    words = content.numel() // 8 * 8
    total = content.numel()
    for part in (*content[:words].view(torch.int64).split(WORDS_AT_ONCE), content[words:].long()):
        odd = torch.full_like(part, 2).cumsum(0) - 1
        total = (total * 31 + int((part * odd).sum())) % 2**63
    return total

"""Label Studio's encoding of masks, that of the brush: run lengths of the bytes of an RGBA image, packed into bits."""

from __future__ import annotations

import numpy as np

from vitrail.data.base import Mask

WORD = 8  # bits of a value
SIZES = (3, 4, 8, 16)  # bits of a run length; each run says which
CHANNELS = 4


def brush_runs(mask: Mask) -> list[int]:
    """The bytes that Label Studio expects as ``rle``.

    32 bits say how many values there are, 5 the bits of a value less one, four times 4 the sizes of run lengths less
    one. A run is a bit 1, 2 bits for the size of its length, its length less one and its value; bits of the last byte
    that are left are 0.
    """
    pixels = mask.ravel()
    bits = [f"{pixels.size * CHANNELS:032b}", f"{WORD - 1:05b}", *(f"{size - 1:04b}" for size in SIZES)]
    ends = np.concatenate([np.flatnonzero(np.diff(pixels)) + 1, [pixels.size]])
    start = 0
    for end in ends.tolist():
        value = "1" * WORD if pixels[start] else "0" * WORD
        left = (end - start) * CHANNELS
        while left:
            length = min(left, 1 << SIZES[-1])
            place = next(place for place, size in enumerate(SIZES) if length <= 1 << size)
            bits += ["1", f"{place:02b}", f"{length - 1:0{SIZES[place]}b}", value]
            left -= length
        start = end
    text = "".join(bits)
    text += "0" * (-len(text) % 8)
    return [int(text[place : place + 8], 2) for place in range(0, len(text), 8)]

"""Convolutions of fewer than 8 channels a group, for the direct kernels."""

from .conv import ConvCase


def _grouped(groups: int, channels: int, features: int, **settings: object) -> ConvCase:
    """`channels` and `features` are those of a group."""
    given = {"kernel": (3, 3), "size": (14, 13), "padding": 1}
    sizes = groups * channels, groups * features
    return ConvCase(*sizes, groups=groups, **given | settings)  # type: ignore[arg-type]


def _depthwise(channels: int, **settings: object) -> ConvCase:
    return _grouped(channels, 1, 1, **settings)


# Filters that have kernels of their own.
WINDOWS = [
    _depthwise(20),
    _depthwise(33, size=(7, 7), batch=3),  # small planes
    _depthwise(8, size=(21, 28), bias=False),  # rows of whole fours
    _depthwise(5, size=(5, 150), padding=0, batch=None),  # several strips of columns
    _depthwise(6, size=(150, 6)),
    _depthwise(36, stride=2, size=(15, 16)),
    _depthwise(12, kernel=(5, 5), padding=2),
    _depthwise(12, kernel=(5, 5), padding=(2, 1), stride=2),
    _depthwise(10, kernel=(7, 7), padding="same", size=(11, 24)),
    _depthwise(10, kernel=(7, 7), padding=3, stride=2),
    _depthwise(1, kernel=(3, 3), size=(1, 1), batch=5),  # nearly all padding
    _grouped(6, 1, 3),  # a channel multiplier
    _grouped(1, 3, 20, kernel=(7, 7), stride=2, padding=3),
    *(_grouped(9, channels, 2, size=(9, 8)) for channels in range(2, 8)),
    _depthwise(16, transposed=True, size=(8, 9)),
    _grouped(3, 4, 2, transposed=True, kernel=(5, 5), padding=3, size=(8, 9)),
]
# Filters of the kernel for all the others.
OTHERS = [
    _depthwise(16, kernel=(1, 1), padding=0),
    _depthwise(12, kernel=(3, 2), stride=(1, 3)),
    _depthwise(12, dilation=2, padding=2),
    _depthwise(6, kernel=(11, 9), padding=(5, 4), batch=None),
    _depthwise(7, kernel=(3, 3), stride=4, padding=0),
    _grouped(5, 7, 3, kernel=(2, 4), dilation=(2, 1), bias=False),
    _depthwise(20, kernel=(4, 4), transposed=True, stride=2, size=(6, 7)),
    _depthwise(5, transposed=True, stride=(2, 3), output_padding=1, dilation=(3, 2), size=(6, 7)),
    _grouped(4, 3, 2, kernel=(3, 5), transposed=True, stride=3, padding=2, size=(5, 6)),
]
DIRECT = WINDOWS + OTHERS

"""How figures are written, in one place: the model, the terminal and every report read the same text.

Times are in seconds, ratios and resolutions are plain fractions (0.009 is 0.9 %).
"""


def latency(seconds: float) -> str:
    """Three significant digits: `128 us`, `22.4 ms`, `1.24 s`."""
    rounded = float(f"{seconds:.3g}")
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if rounded >= size or unit == "us":
            break
    value = rounded / size
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f} {unit}"


def speedup(ratio: float, resolution: float | None = None) -> str:
    """`2.76x ± 0.9 %`; a third decimal close to 1, where the second would say `equal`."""
    decimals = 3 if abs(ratio - 1) < 0.1 else 2 if ratio < 99.995 else 0
    text = f"{ratio:.{decimals}f}x"
    return text if resolution is None else f"{text} ± {percent(resolution)}"


def percent(fraction: float) -> str:
    """`0.9 %`; two decimals below 0.1 %, none from 10 %."""
    value = 100 * abs(fraction)
    decimals = 2 if value < 0.095 else 1 if value < 9.95 else 0
    return f"{value:.{decimals}f} %"


def error(value: float) -> str:
    """A relative error: `2.1e-07`."""
    return f"{value:.1e}"


def tokens(count: int) -> str:
    """`950`, `4.2k`, `412k`, `1.9M`."""
    if count < 1000:
        return str(count)
    if count < 9_950:
        return f"{count / 1e3:.1f}k"
    if count < 999_500:
        return f"{count / 1e3:.0f}k"
    return f"{count / 1e6:.1f}M"


def elapsed(seconds: float) -> str:
    """`03:12:40`; hours go on past 99."""
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{rest:02d}"


def amount(count: int, thing: str) -> str:
    """`1 turn`, `214 turns`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def strength(planted: int, caught: int, allclose: int) -> str:
    """`22 of 22 planted errors are caught; allclose(1e-2) on one random input catches 12`."""
    return f"{caught} of {planted} planted errors are caught; allclose(1e-2) on one random input catches {allclose}"

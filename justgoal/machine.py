"""What this machine is, as far as a result depends on it. Never its name."""

import platform
from pathlib import Path

FEATURES = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_vnni", "amx_bf16")
"""Of a processor: those that a solution may have been written for."""

INTRINSICS = {"_mm512_": "avx512f", "_mm256_": "avx2", "_mm256_fmadd": "fma", "_tile_": "amx_bf16"}
"""What a source text calls, and the feature that this needs."""


def processor() -> tuple[str, list[str]]:
    """Its model, and which of FEATURES it has."""
    model, flags = platform.machine(), set[str]()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
        elif name.strip() == "flags":
            flags = set(value.split())
    return model, [feature for feature in FEATURES if feature in flags]


def missing_features(text: str) -> list[str]:
    """Features that a text with solutions in it names intrinsics of and that this processor does not have."""
    needed = {feature for word, feature in INTRINSICS.items() if word in text}
    return sorted(needed - set(processor()[1]))

"""What a machine says of its processor at the moment: cores, clock, temperature."""

from __future__ import annotations

from contextlib import suppress

import psutil


def processor_in_words() -> str:
    """`cores 0-3, 2.10 of 3.50 GHz, 71 degrees`: what can be read here; '' for nothing."""
    words: list[str] = []
    with suppress(AttributeError, OSError, psutil.Error):
        cores = psutil.Process().cpu_affinity() or []
        words.append(f"on {len(cores)} of {psutil.cpu_count()} cores, load {psutil.getloadavg()[0]:.1f}")
    with suppress(AttributeError, OSError, RuntimeError, NotImplementedError):
        clock = psutil.cpu_freq()
        if clock and clock.current:
            words.append(f"{clock.current / 1000:.2f}{f' of {clock.max / 1000:.2f}' if clock.max else ''} GHz")
    with suppress(AttributeError, OSError):
        degrees = [sensor.current for sensors in psutil.sensors_temperatures().values() for sensor in sensors]
        if degrees:
            words.append(f"{max(degrees):.0f} degrees")
    return ", ".join(words)

"""Devices and links as data. No torch at import."""

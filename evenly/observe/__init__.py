"""RECORDING: what a run writes down as it goes; cheap, and importable by everything that runs."""

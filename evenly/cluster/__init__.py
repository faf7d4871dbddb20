"""Who am I, and how ranks are started: environment, world, launcher, doctor. Imports no torch."""

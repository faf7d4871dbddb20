"""Checkpoints: a run's state on disk, valid in one atomic act, loadable under any plan, never unpickled."""

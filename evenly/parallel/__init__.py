"""HOW a plan changes a module: one file per strategy, none imports another; `compose` alone knows them all."""

"""Imported by the fork server before all else: it collects no garbage, which would take a quarter of its imports' time.

Ranks collect again (`rank_main`).
"""

import gc

gc.disable()

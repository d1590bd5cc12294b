"""The patch: attention's query and key projections as frames, and back. `patching.py` is where to start."""

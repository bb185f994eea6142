"""Data: prompts, offline data, buffers, and cursors that resume exactly."""

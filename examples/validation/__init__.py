"""The stages of validate_gpu.py, one module each, and their report."""

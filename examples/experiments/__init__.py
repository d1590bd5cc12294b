"""The paper's experiments; `examples/experiment.py` runs them."""

"""examples/optimize_frame.py: the optimizer alone finds an eigenspace."""

import pytest
from support.example_scripts import optimize_frame


@pytest.mark.parametrize("seed", range(3))
def test_frame_reaches_the_leading_eigenspace(seed, capsys):
    assert optimize_frame.main(["--smoke", "--seed", str(seed)]) == 0
    assert "distance to the true eigenspace" in capsys.readouterr().out


def test_too_few_steps_are_reported_as_failure():
    assert optimize_frame.main(["--steps", "3"]) == 1

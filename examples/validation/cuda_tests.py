"""The suite's tests that need a CUDA device."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from .rows import Row, Settings, left_out

ROOT = Path(__file__).resolve().parents[2]


def rows(settings: Settings, tests: Path = ROOT / "tests") -> Iterator[Row]:
    if not settings.cuda:
        yield left_out("pytest -m cuda", "it needs a CUDA device")
        return
    found = settings.out / "stages" / "cuda_tests.xml"
    found.unlink(missing_ok=True)  # an earlier run's must not speak for this one
    command = [sys.executable, "-m", "pytest", "-v", "-m", "cuda", "-p", "no:cacheprovider", "-c", "pyproject.toml"]
    subprocess.run([*command, f"--junitxml={found}", str(tests)], cwd=ROOT, check=False)
    yield from counted(found)


def counted(found: Path) -> Iterator[Row]:
    """The figures of a JUnit file, and the name of every test that failed."""
    suite = ElementTree.parse(found).getroot().find("testsuite")
    assert suite is not None, f"{found} holds no testsuite"
    failed, skipped = int(suite.attrib["failures"]) + int(suite.attrib["errors"]), int(suite.attrib["skipped"])
    passed = int(suite.attrib["tests"]) - failed - skipped
    yield Row("pytest -m cuda, passed", str(passed), "≥ 1", passed >= 1)
    yield Row("pytest -m cuda, failed", str(failed), "≤ 0", failed == 0)
    yield Row("pytest -m cuda, skipped", str(skipped))
    for case in suite.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            yield Row(f"{case.attrib['classname']}::{case.attrib['name']}", "failed", "passes", False)

"""Shows that the tests of docs/reliability.md can fail: breaks the source on purpose, one change at a time.

``python tools/mutations.py`` makes each change of tools/mutations.toml in a temporary copy of the tree, runs the test
that must notice it and prints what became of it; ``--only TEXT`` chooses changes by their description, file or test.
The exit code is 1 if a change is not noticed, or no longer fits the source.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tools" / "mutations.toml"
LIMIT = 600.0  # seconds for a test
LINES = 25  # of the output of a test that fails for another reason
FAILED, STALE, NOT_NOTICED = "failed as it should", "STALE", "NOT NOTICED"


@dataclass(frozen=True)
class Mutation:
    """A change of a file that breaks a promise, and the test that must fail for it."""

    change: str  # in a few words
    file: str
    old: str  # occurs in the file exactly once
    new: str
    test: str  # with the parameters that are enough; or a part of the soak, tests/soak/NAME.py
    reason: str  # occurs in what pytest or the soak says about the failure
    full: bool = False  # the test is one of `make test-all`
    minutes: float = 1.0  # of the soak

    @property
    def named(self) -> str:
        """The test as docs/reliability.md names it."""
        return self.test.partition("[")[0]

    def is_stale(self, root: Path) -> bool:
        path = root / self.file
        return not path.is_file() or path.read_text(encoding="utf-8").count(self.old) != 1

    def outcome(self, root: Path) -> str:
        """What becomes of the test in a copy of the tree, whose file is then as before."""
        if self.is_stale(root):
            return STALE
        path = root / self.file
        content = path.read_text(encoding="utf-8")
        path.write_text(content.replace(self.old, self.new), encoding="utf-8")
        try:
            code, output = self._run(root)
        except subprocess.TimeoutExpired:
            return f"{NOT_NOTICED} within {LIMIT:.0f} s"
        finally:
            path.write_text(content, encoding="utf-8")
        if code == 1 and self.reason in failure(output):
            return FAILED
        other = "\n".join(["not for this reason", *output.splitlines()[-LINES:]])
        return f"{NOT_NOTICED}: {other if code else 'it passed'}"

    def _run(self, root: Path) -> tuple[int, str]:
        """The exit code and the output of the test."""
        command = ["-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider", self.test]
        if self.full:
            command += ["-m", ""]
        if "::" not in self.test:
            command = ["tools/soak.py", "--only", Path(self.test).stem, "--minutes", str(self.minutes)]
        # byte code is told by time and size, and could be that of another change: it is not written
        settings = {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        settings |= {"VITRAIL_TEST_ALL": "1"} if self.full else {}
        with subprocess.Popen(
            [sys.executable, *command], cwd=root, env=os.environ | settings, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=LIMIT)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
                raise
        return process.returncode, output


def failure(output: str) -> str:
    """What a soak says is broken, or pytest's lines about errors and groups of errors, and its summary."""
    broken = output.partition("\nBROKEN ")[2]
    return broken or "\n".join(re.findall(r"^(?:E  |FAILED | +\| ).*", output, re.MULTILINE))


def read() -> list[Mutation]:
    return [Mutation(**values) for values in tomllib.loads(DATA.read_text(encoding="utf-8"))["mutation"]]


def copy_tree(target: Path) -> None:
    """Copies what belongs to the project, as a repository: some tests ask git what does."""
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for words in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", "-C", str(target), *words], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a description, file or test")
    only, outcomes = parser.parse_args().only, list[str]()
    with tempfile.TemporaryDirectory(prefix="vitrail-mutations-") as name:
        copy_tree(Path(name))
        for mutation in read():
            if any(only in text for text in (mutation.change, mutation.file, mutation.test)):
                begin = time.monotonic()
                outcomes.append(mutation.outcome(Path(name)))
                seconds = time.monotonic() - begin
                print(f"{mutation.change} | {mutation.named} | {seconds:.0f} s | {outcomes[-1]}", flush=True)
    print(f"{len(outcomes)} changes, {outcomes.count(FAILED)} noticed")
    return 0 if outcomes and outcomes.count(FAILED) == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Shows that the tests of docs/reliability.md can fail: breaks the source on purpose, one change at a time.

``python tools/mutations.py`` applies each change of tools/mutations.toml to a temporary copy of the tree, runs the test
that must notice it and prints the outcome; ``--only TEXT`` chooses changes by their description, file or test,
``--list`` runs nothing. The exit code is 1 if a change is not noticed or no longer fits the source.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    test: str  # with the parameters that are enough; or a module of tests/soak, which a minute is spent on
    reason: str  # occurs in the lines of the failure
    full: bool = False  # whether the test is one of `make test-all`
    minutes: float = 1.0  # of a soak

    @property
    def named(self) -> str:
        """The test as docs/reliability.md names it."""
        return self.test.partition("[")[0]

    def is_stale(self, root: Path) -> bool:
        path = root / self.file
        return not path.is_file() or path.read_text(encoding="utf-8").count(self.old) != 1

    def command(self) -> list[str]:
        """Runs the test, or the part of the soak."""
        if "::" not in self.test:
            return ["tools/soak.py", "--only", Path(self.test).stem, "--minutes", f"{self.minutes:g}"]
        chosen = ["-m", ""] if self.full else []
        return ["-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider", *chosen, self.test]

    def outcome(self, root: Path) -> str:
        """What became of the test in a copy of the tree, which is the same afterwards."""
        if self.is_stale(root):
            return STALE
        path = root / self.file
        content = path.read_text(encoding="utf-8")
        path.write_text(content.replace(self.old, self.new), encoding="utf-8")
        # Byte code is not written: it is told by time and size, and could be that of another change.
        settings = {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"} | (
            {"VITRAIL_TEST_ALL": "1"} if self.full else {}
        )
        try:
            done = subprocess.run(
                [sys.executable, *self.command()], cwd=root, env=os.environ | settings, timeout=LIMIT, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, errors="replace",
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"{NOT_NOTICED} within {LIMIT:.0f} s"
        finally:
            path.write_text(content, encoding="utf-8")
        if done.returncode == 1 and self.reason in failure(done.stdout):
            return FAILED
        return f"{NOT_NOTICED}: " + (
            "not for this reason:\n" + "\n".join(done.stdout.splitlines()[-LINES:]) if done.returncode else "it passed"
        )


def failure(output: str) -> str:
    """What pytest says about errors (lines with an E or of a group of errors, and the summary), or what a soak found."""
    soak = output.partition("\nBROKEN ")[2]
    return soak or "\n".join(re.findall(r"^(?:E  |FAILED | +\| ).*", output, re.MULTILINE))


def read() -> tuple[list[Mutation], dict[str, str]]:
    """The changes, and the tests for which there is none, with the reason."""
    data: dict[str, Any] = tomllib.loads(DATA.read_text(encoding="utf-8"))
    return [Mutation(**values) for values in data["mutation"]], data.get("without", {})


def copy_tree(target: Path) -> None:
    """Copies what belongs to the project; a repository of its own, as some tests ask git what does."""
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for arguments in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", "-C", str(target), *arguments], check=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a description, file or test")
    parser.add_argument("--list", action="store_true", help="run nothing")
    arguments = parser.parse_args(words)
    chosen = [m for m in read()[0] if any(arguments.only in text for text in (m.change, m.file, m.test))]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="vitrail-mutations-") as name:
        if not arguments.list:
            copy_tree(Path(name))
        for mutation in chosen:
            begin = time.monotonic()
            found = "not run" if arguments.list else mutation.outcome(Path(name))
            print(f"{mutation.change} | {mutation.named} | {found} | {time.monotonic() - begin:.0f} s", flush=True)
            outcomes.append(found)
    wrong = [found for found in outcomes if found not in (FAILED, "not run")]
    print(f"{len(outcomes)} changes, {len(wrong)} not noticed or stale")
    return 1 if wrong or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Checks the subjects of commits: `area: verb object` or `area, area: verb object`, with the verb in the
imperative, in at most LONGEST characters. The checked commits are those after CHECKED on HEAD's first-parent
history; merges are exempt. Without git or CHECKED (an archive, a shallow clone) nothing is checked."""

import re
import subprocess
import sys
from pathlib import Path

from repository import ROOT

CHECKED = "24e2bf7dad8e739948bb703911132481b12bac68"
LONGEST = 72
SHAPE = re.compile(r"[a-z][\w.]*(?:, [a-z][\w.]*)*: (?P<verb>[a-z][\w-]*),? \S.*(?<!\.)")
# First words that are no verbs in the imperative.
NOT_A_VERB = re.compile(
    r"(?:an?|the|no|not|all|some|what|where|when|how|if|for|in|on|to|of|now|new|more|better|also)|"
    r"\w+(?:ing|tion)(?<!bring)(?<!mention)(?<!position)|\w+ed(?<!embed)(?<!feed)(?<!need)(?<!seed)(?<!speed)(?<!shed)"
)


def fault(subject: str) -> str:
    """What is wrong with a subject; "" if nothing is."""
    if len(subject) > LONGEST:
        return f"{len(subject)} characters, expected at most {LONGEST}"
    match = SHAPE.fullmatch(subject)
    if match is None:
        return "expected `area: verb object` without a full stop"
    if NOT_A_VERB.fullmatch(match["verb"]):
        return f"expected a verb in the imperative after the area, not {match['verb']!r}"
    return ""


def commits(folder: Path, since: str) -> list[tuple[str, str]]:
    """Hashes and subjects of the commits after `since`; none if git or `since` is missing."""
    log = ["git", "log", "--first-parent", "--no-merges", "--format=%h %s", f"{since}..HEAD"]
    try:
        done = subprocess.run(log, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    pairs = (line.partition(" ") for line in done.stdout.splitlines())
    return [(commit, subject) for commit, _, subject in pairs] if done.returncode == 0 else []


def main() -> int:
    found = commits(ROOT, CHECKED)
    wrong = [f"{commit} {subject!r}: {problem}" for commit, subject in found if (problem := fault(subject))]
    print(*wrong, f"{len(found)} subjects of commits", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

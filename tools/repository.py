"""For the checks: the repository's root, and its files: tracked ones and new ones that git does not ignore."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def tracked() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout.decode()
    return sorted(ROOT / name for name in set(listing.split("\0")) if name and (ROOT / name).is_file())

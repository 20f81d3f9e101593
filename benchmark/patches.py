"""variants/*/NAME.patch -> runs/variants/NAME.py: the script of its line `--- SCRIPT.py`, changed.

Run:  python benchmark/patches.py variants/ideas/NAME.patch    prints the path of the new script

The new script's last line is a comment with a digest of the lines that the patch takes away and
adds, so results of a patch that says something else by now are told from today's.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from results import ROOT

MADE = ROOT / "runs" / "variants"


def original_of(patch: Path) -> str:
    """The name of the script that a patch changes."""
    found = re.search(r"(?m)^--- (?:a/)?(\w+\.py)\s", patch.read_text())
    if not found:
        raise ValueError(f"{patch.name} has no line `--- SCRIPT.py`")
    return found[1]


def digest_of(patch: Path) -> str:
    """Of the lines that it takes away and adds, not of where they are."""
    body = patch.read_text().partition("\n@@")[2]
    lines = [line for line in body.splitlines() if line[:1] in ("+", "-")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def patched(patch: Path, folder: Path) -> Path:
    """The changed script in a folder; a line there that no longer fits is an error."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"{patch.stem}.py"
    original = ROOT / original_of(patch)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        made = Path(temporary) / script.name
        command = ["patch", "--force", "--silent", "--fuzz=0", "--reject-file=-"]
        command += [f"--output={made}", original, patch]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{patch.name} does not fit {original.name}: {done.stdout}")
        with open(made, "a") as file:
            file.write(f"# changed by {patch.name}, digest {digest_of(patch)}\n")
        made.replace(script)  # at once: a run may just be reading the one from before
    return script


def script_of(name: str) -> Path:
    """The script of a row of recipes.csv."""
    return patched(ROOT / name, MADE) if name.endswith(".patch") else ROOT / name


if __name__ == "__main__":
    try:
        print(script_of(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")

"""The project's pinned dependencies, one a line: what the image installs before the code is there."""

import tomllib
from pathlib import Path

for requirement in tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]:
    print(requirement)

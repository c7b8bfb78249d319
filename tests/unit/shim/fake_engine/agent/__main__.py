"""`python -m agent locate-image ID`: says what $FAKE_ENGINE/located holds, if anything."""

import os
from pathlib import Path

located = Path(os.environ["FAKE_ENGINE"]) / "located"
if located.exists():
    print(located.read_text())

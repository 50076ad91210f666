"""Tests run at the smallest profile, offline, in a build folder of their own."""
import os
from pathlib import Path

os.environ.setdefault("COURSE_PROFILE", "smoke")
os.environ.setdefault("COURSE_BUILD", str(Path(__file__).parent / "build" / "test"))

"""The Chromium of this machine, for tests that look at pages."""

import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next((path for path in map(shutil.which, NAMES) if path), None)

needs_chromium = pytest.mark.skipif(FOUND is None, reason=f"no browser on PATH: {', '.join(NAMES)}")

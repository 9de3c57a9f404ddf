"""A headless Chromium, for tests that look at pages."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next((path for path in map(shutil.which, NAMES) if path), None)

needs_chromium = pytest.mark.skipif(FOUND is None, reason=f"no browser on PATH: {', '.join(NAMES)}")


class Browser:
    """Opens local pages, each in a process of its own.

    Args:
        folder: for its profile and its pictures.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def screenshot(
        self, page: Path, *options: str, fragment: str = "", size: tuple[int, int] = (900, 600)
    ) -> np.ndarray:
        """The page's picture, ``[height, width, 3]`` in 0..255.

        Raises:
            AssertionError: the page wrote to the console, which is where errors go.
        """
        picture = self.folder / "screenshot.png"
        picture.unlink(missing_ok=True)
        self._run(f"--screenshot={picture}", f"--window-size={size[0]},{size[1]}", *options, address(page, fragment))
        return (imread(picture)[:, :, :3] * 255).round().astype(int)

    def dom(self, page: Path) -> str:
        """The page as the browser understood it."""
        return self._run("--dump-dom", address(page, ""))

    def _run(self, *args: str) -> str:
        assert FOUND
        command = [
            *(FOUND, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"),
            *("--enable-logging=stderr", "--force-device-scale-factor=1", "--virtual-time-budget=2000"),
            "--run-all-compositor-stages-before-draw",  # otherwise a busy machine leaves holes in pictures
            *(f"--user-data-dir={self.folder / 'profile'}", "--disable-background-networking", "--no-first-run"),
        ]
        done = subprocess.run([*command, *args], capture_output=True, text=True, timeout=120, check=True)
        assert "CONSOLE" not in done.stderr, done.stderr
        return done.stdout


def address(page: Path, fragment: str) -> str:
    return page.resolve().as_uri() + (f"#{fragment}" if fragment else "")


def share(picture: np.ndarray, color: str) -> float:
    """How much of a picture has a colour, ``#rrggbb``, give or take what rounding does."""
    wanted = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return float((abs(picture - wanted).max(axis=2) <= 2).mean())

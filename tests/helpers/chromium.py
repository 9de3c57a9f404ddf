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
    """Opens local pages, each in a process of its own; its profile and its pictures are in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def screenshot(
        self, page: Path, *options: str, fragment: str = "", size: tuple[int, int] = (900, 600)
    ) -> np.ndarray:
        """The page's picture, ``[height, width, 3]`` in 0..255. It may write no errors to the console."""
        file = self.folder / "screenshot.png"
        for _ in range(3):  # a busy machine may take the picture before anything is drawn
            address = page.resolve().as_uri() + (f"#{fragment}" if fragment else "")
            self._run(f"--screenshot={file}", f"--window-size={size[0]},{size[1]}", *options, address)
            picture = (imread(file)[:, :, :3] * 255).round().astype(int)
            file.unlink()
            if picture.min() < picture.max():
                break
        return picture

    def _run(self, *args: str) -> None:
        assert FOUND
        command = [
            *(FOUND, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"),
            *("--enable-logging=stderr", "--force-device-scale-factor=1", "--virtual-time-budget=2000"),
            "--run-all-compositor-stages-before-draw",  # otherwise a busy machine leaves holes in pictures
            *(f"--user-data-dir={self.folder / 'profile'}", "--disable-background-networking", "--no-first-run"),
        ]
        for attempts_left in (2, 1, 0):  # on a machine that does much else, a browser may not come up
            try:
                done = subprocess.run([*command, *args], capture_output=True, text=True, timeout=60, check=True)
                break
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
                if not attempts_left:
                    raise
        assert "CONSOLE" not in done.stderr, done.stderr


def share(picture: np.ndarray, color: str) -> float:
    """How much of a picture has a colour, ``#rrggbb``, give or take what rounding does."""
    wanted = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return float((abs(picture - wanted).max(axis=2) <= 2).mean())

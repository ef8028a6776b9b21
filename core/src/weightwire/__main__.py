"""``python -m weightwire``."""

from __future__ import annotations

from weightwire.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

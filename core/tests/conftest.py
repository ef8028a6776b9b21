"""Fixtures that the tests of core share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

FakeDist = Callable[..., Path]


@pytest.fixture
def fake_dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDist:
    """Pretend that a distribution is installed: a ``*.dist-info`` folder and its modules, in a folder on ``sys.path``.

    ``fake_dist("weightwire-mine", {"mine": "weightwire_mine"}, weightwire_mine="source")`` gives that folder. Give each
    test's modules names of their own: what is imported stays in ``sys.modules``.
    """

    def make(
        name: str,
        entry_points: dict[str, str] | str,
        *,
        version: str = "1.0",
        group: str = "weightwire.backends",
        metadata: str | None = None,
        **modules: str,
    ) -> Path:
        site = tmp_path / f"{name}-{version}"
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        if metadata is None:
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: fake {name}\n"
        info.joinpath("METADATA").write_text(metadata)
        if isinstance(entry_points, dict):
            lines = [f"{key} = {value}" for key, value in entry_points.items()]
            entry_points = "\n".join([f"[{group}]", *lines])
        info.joinpath("entry_points.txt").write_text(entry_points, encoding="latin-1")
        for module, source in modules.items():
            site.joinpath(f"{module}.py").write_text(dedent(source))
        monkeypatch.syspath_prepend(str(site))
        return site

    return make

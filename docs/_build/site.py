"""Copy the pages of the repository into one folder for Sphinx, with links between them, and export the explorer beside them.

    python docs/_build/site.py build/site-source

A link to a file that is no page of the site, such as a result or a source file, becomes its text.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The pages in the order of the menu, by their group; paths in the repository. README.md is the first page.
MENU = {
    "Begin": (
        "docs/installing.md", "docs/add_norm.md", "docs/explorer.md", "docs/command_line.md", "docs/glossary.md",
        "docs/troubleshooting.md",
    ),
    "Build": (
        "docs/wirings.md", "docs/several_streams.md", "docs/own_coefficients.md", "docs/numerics.md", "docs/pytorch.md",
        "docs/api.md",
    ),
    "Look into a model": ("docs/streams.md", "docs/porting.md", "docs/fusing.md", "docs/zoo.md"),
    "Compare": ("docs/comparing.md", "docs/claims.md"),
    "Train and deploy": ("docs/distributed.md", "docs/deploying.md", "docs/routes.md", "docs/gpu.md"),
    "Speed": ("docs/performance.md", "docs/targets.md", "benchmarks/README.md"),
    "The project": ("docs/architecture.md", "csrc/README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
}  # fmt: skip
EXPLORER = "explore"  # folder of the exported explorer on the site
LINKED = ("index", "explorer")  # pages with a link to it, below their first picture
PICTURE = re.compile(r"^(!\[.*\)|<picture>.*)\n", re.MULTILINE)
HTML_FIGURE = re.compile(r'(src(?:set)?=")docs/(figures/[\w.-]+)')  # Sphinx copies no figure that HTML names
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
COMMENT = re.compile(r"^<!-- /?[\w:.-]+ -->\n", re.MULTILINE)  # marks of generated sections


def main(target: Path) -> None:
    """Write the pages, the figures, the first page with the menu, and the settings."""
    pages = {path: name_of(path) for group in MENU.values() for path in group} | {
        "README.md": "index", "docs/README.md": "index",
    }  # fmt: skip
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs" / "_site", target)
    for place in ("figures", "extra/figures"):
        shutil.copytree(ROOT / "docs" / "figures", target / place)
    for path, name in pages.items():
        if path != "docs/README.md":
            text = rewrite((ROOT / path).read_text(encoding="utf-8"), path, pages)
            if name in LINKED:
                text = PICTURE.sub(lambda picture: picture[0] + link_to_explorer(), text, count=1)
            (target / f"{name}.md").write_text(text + (menu() if name == "index" else ""), encoding="utf-8")


def link_to_explorer() -> str:
    """Return the link to the exported explorer, as HTML: Sphinx would take a file of the site for a download."""
    return (
        f'\n<p><a href="{EXPLORER}/index.html">Move the LayerNorm in your browser</a>, with nothing to install.</p>\n'
    )


def export_explorer(target: Path) -> None:
    """Write the explorer with a recording of MiniLM to a folder that Sphinx copies into the site."""
    recording = target / "minilm.json"
    for arguments in (
        ["record", "minilm", "--memory-map", "--out", recording],
        ["explore", "--export", target / "extra" / EXPLORER, recording],
    ):
        subprocess.run([sys.executable, "-m", "addnorm", *map(str, arguments)], check=True)


def name_of(path: str) -> str:
    """Return the name of a page on the site: that of its folder for a README."""
    page = Path(path)
    return page.parent.name if page.name == "README.md" else page.stem.lower()


def menu() -> str:
    """Return the menu of the pages, which the theme shows at the side."""
    groups = (
        "\n```{toctree}\n:hidden:\n:caption: " + title + "\n\n" + "\n".join(map(name_of, group)) + "\n```\n"
        for title, group in MENU.items()
    )
    return "".join(groups)


def rewrite(text: str, path: str, pages: dict[str, str]) -> str:
    """Return a page with its links to other pages and to figures as they are on the site."""

    def replace(link: re.Match[str]) -> str:
        mark, label, address, anchor = link.groups()
        file = (ROOT / path).parent.joinpath(address).resolve()
        if not file.exists():
            raise SystemExit(f"{path} has a link to {address}, which does not exist.")
        place = file.relative_to(ROOT).as_posix()
        if mark:
            return f"![{label}]({place.removeprefix('docs/')})"
        return f"[{label}]({pages[place]}.md{anchor or ''})" if place in pages else label

    return HTML_FIGURE.sub(r"\1\2", LINK.sub(replace, COMMENT.sub("", text)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    export_explorer(Path(sys.argv[1]))

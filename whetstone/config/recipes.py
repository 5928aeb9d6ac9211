"""Recipes that ship with the package: where they lie, and which file a name means."""

import os
from pathlib import Path

from whetstone.config.yaml_text import check_text, shorten
from whetstone.errors import UserError

# Configurations of accelerate that lie beside the recipes, for its command line.
NOT_RECIPES = ("zero3.yaml",)


def find(source: str | os.PathLike[str]) -> Path:
    """The file that `source` means: a path, or the name of a recipe that ships with the package."""
    check_text(str(source), "The name of the configuration")
    given = Path(source)
    try:
        if given.is_file():
            return given
        for folder in recipe_folders():
            for candidate in (folder / given, folder / f"{given}.yaml", folder / given.name):
                if candidate.is_file():
                    return candidate
    except OSError as error:
        raise UserError(f"'{shorten(str(source))}' can't be read ({error.strerror}).") from None
    if given.is_dir():
        raise UserError(f"'{shorten(str(source))}' is a folder: give a YAML file inside it.")
    raise UserError(
        f"There is no configuration file '{shorten(str(source))}': give the path of a YAML file, or one of "
        f"the recipes {', '.join(recipe_names())}."
    )


def recipe_folders() -> list[Path]:
    """Where shipped recipes lie: inside the installed package, or beside it in a clone."""
    package = Path(__file__).resolve().parent.parent
    return [folder for folder in (package / "recipes", package.parent / "config") if folder.is_dir()]


def recipe_names() -> list[str]:
    """Every shipped recipe, as `whet train NAME` takes it."""
    return sorted(
        {
            path.relative_to(folder).with_suffix("").as_posix()
            for folder in recipe_folders()
            for path in folder.rglob("*.yaml")
            if path.name not in NOT_RECIPES
        }
    )
